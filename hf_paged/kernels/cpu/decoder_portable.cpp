// Decoder layers for the instruction set "portable"; see build.py for the compiler flags.
#define HFP_DECODE hfp_decode_portable
#define HFP_PROJECT hfp_project_portable
#define HFP_USE_AMX 0
#include "decoder.inl"
