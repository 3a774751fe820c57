// What the thread sanitizer's program has of levels whose kernels are left out of it (fuzz.cmake): none. Weak, so that a
// kernel file that is linked takes its place.
#include "kernels/gemm/gemm.h"
#include "kernels/testing/gemm_emulated.h"

namespace moebius {

[[gnu::weak]] GemmKernels gemms_avx2() { return {nullptr, 0}; }
[[gnu::weak]] GemmKernels gemms_avx512() { return {nullptr, 0}; }
[[gnu::weak]] GemmKernels gemms_avx512_vnni() { return {nullptr, 0}; }
[[gnu::weak]] GemmKernels gemms_avx512_bf16() { return {nullptr, 0}; }
[[gnu::weak]] GemmKernels gemms_amx() { return {nullptr, 0}; }
[[gnu::weak]] GemmKernels gemms_amx_emulated() { return {nullptr, 0}; }

}  // namespace moebius
