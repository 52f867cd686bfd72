// Attention for the instruction set "avx2"; see build.py for the compiler flags.
#define HFP_ATTEND hfp_attend_avx2
#define HFP_USE_AMX 0
#include "attend.inl"
