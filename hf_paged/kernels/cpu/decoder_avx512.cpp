// Decoder layers for the instruction set "avx512"; see build.py for the compiler flags.
#define HFP_DECODE hfp_decode_avx512
#define HFP_PROJECT hfp_project_avx512
#define HFP_USE_AMX 0
#include "decoder.inl"
