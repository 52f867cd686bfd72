// Decoder layers for the instruction set "avx2"; see build.py for the compiler flags.
#define HFP_DECODE hfp_decode_avx2
#define HFP_PROJECT hfp_project_avx2
#define HFP_USE_AMX 0
#include "decoder.inl"
