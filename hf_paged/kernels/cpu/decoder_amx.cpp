// Decoder layers for the instruction set "amx"; see build.py for the compiler flags.
#define HFP_DECODE hfp_decode_amx
#define HFP_PROJECT hfp_project_amx
#define HFP_USE_AMX 1
#include "decoder.inl"
