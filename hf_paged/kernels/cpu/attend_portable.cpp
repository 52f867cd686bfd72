// Attention for the instruction set "portable"; see build.py for the compiler flags.
#define HFP_ATTEND hfp_attend_portable
#define HFP_USE_AMX 0
#include "attend.inl"
