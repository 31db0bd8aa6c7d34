#include "kernels.h"

#include "codecs.h"

#ifdef UNISONO_X86
#include <cpuid.h>
#endif

namespace unisono {
namespace {

#ifdef UNISONO_X86
// clang 14 cannot be asked for it by name. That the system saves the registers that it needs is part of having AVX2.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

struct Level {
  const char* name;
  detail::KernelLookup lookup;
  const Codec* (*codec)(DType);
};

Level widest_level() {
#ifdef UNISONO_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return {"avx512", detail::kernels_avx512, detail::codec_avx512};
  if (__builtin_cpu_supports("avx2") && has_f16c()) return {"avx2", detail::kernels_avx2, detail::codec_avx2};
#endif
  return {"baseline", detail::kernels_baseline, detail::codec_baseline};
}

const Level& level() {
  static const Level chosen = widest_level();
  return chosen;
}

}  // namespace

ReduceFunction reduce_function(DType dtype, Combine combine) { return level().lookup(dtype, combine); }

const Codec* codec(DType form) { return level().codec(form); }

const char* simd_level() { return level().name; }

}  // namespace unisono
