#include "kernels/kernels.h"

#include <cstring>

#include "kernels/float_environment.h"
#include "kernels/wire_formats.h"
#include "system/cache_line.h"

#ifdef UNISONO_X86
#include <cpuid.h>
#endif

namespace unisono {
namespace {

#ifdef UNISONO_X86
// Whether the processor has F16C instructions. clang 14 has no name for this check. AVX2 implies that the system saves
// the registers.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

struct Level {
  const char* name;
  detail::KernelLookup lookup;
  const detail::CodecFunctions* (*codec)(DType);
  detail::CopyFunction copy;
};

// No C library copies shorter arrays by `rep movsb`.
constexpr std::size_t least_moved_nbytes = 1 << 10;

Level widest_level() {
#ifdef UNISONO_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return {"avx512", detail::kernels_avx512, detail::codec_avx512, detail::copy_avx512};
  if (__builtin_cpu_supports("avx2") && has_f16c())
    return {"avx2", detail::kernels_avx2, detail::codec_avx2, detail::copy_avx2};
#endif
  return {"baseline", detail::kernels_baseline, detail::codec_baseline, detail::copy_baseline};
}

const Level& level() {
  static const Level chosen = widest_level();
  return chosen;
}

}  // namespace

// This function is not inlined, because its long callers would be compiled to more instructions (`make counts`).
[[gnu::noinline]] void Kernel::operator()(std::byte* dst, const std::byte* const* sources, std::size_t sources_count,
                                          std::size_t count, std::uint64_t divisor) const {
  const DefaultFloatEnvironment environment;
  function_(dst, sources, sources_count, count, divisor);
}

Kernel find_kernel(DType dtype, Combine combine) { return level().lookup(dtype, combine); }

void Codec::encode(std::byte* wire, const float* x, float* residual, std::size_t count) const {
  const DefaultFloatEnvironment environment;
  functions_->encode(wire, x, residual, count);
}

void Codec::decode(float* x, const std::byte* wire, std::size_t count, bool adds) const {
  const DefaultFloatEnvironment environment;
  functions_->decode(x, wire, count, adds);
}

Codec find_codec(DType form) { return level().codec(form); }

// By measurement, `rep movsb` is slow if dst lies less than a cache line further into its page than src.
bool is_slow_for_rep_movsb(const std::byte* dst, std::uintptr_t src) {
  constexpr std::uintptr_t page = 4096;
  const std::uintptr_t further = (reinterpret_cast<std::uintptr_t>(dst) - src) % page;
  return further != 0 && further < cache_line;
}

void copy_array(std::byte* dst, const std::byte* src, std::size_t nbytes) {
  if (nbytes >= least_moved_nbytes && is_slow_for_rep_movsb(dst, reinterpret_cast<std::uintptr_t>(src)))
    level().copy(dst, src, nbytes);
  else
    std::memcpy(dst, src, nbytes);
}

const char* simd_level() { return level().name; }

}  // namespace unisono
