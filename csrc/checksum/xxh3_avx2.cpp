#define FLASHCKPT_VARIANT kXxh3Avx2
#define XXH_VECTOR 2 // XXH_AVX2
#include "checksum/variant.inc"
