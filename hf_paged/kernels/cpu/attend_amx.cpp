// Attention for the instruction set "amx"; see build.py for the compiler flags.
#define HFP_ATTEND hfp_attend_amx
#define HFP_USE_AMX 1
#include "attend.inl"
