// Attention for the instruction set "avx512_bf16"; see build.py for the compiler flags.
#define HFP_ATTEND hfp_attend_avx512_bf16
#define HFP_USE_AMX 0
#include "attend.inl"
