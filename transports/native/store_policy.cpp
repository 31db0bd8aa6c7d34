#include "store_policy.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace unisono {
namespace {

// A fill that is shorter is not worth a decision.
constexpr std::size_t least_fill = 8 << 10;
constexpr std::size_t sample_nbytes = 2 << 10;
// A sample that speaks against the present way is followed by another one at once.
constexpr std::uint32_t fills_per_sample = 16;
// Nanoseconds of a sample from which ordinary stores are too slow, and below which they are fast enough again.
// Measured: 70 to 100 with a common cache, 200 to 700 without.
constexpr std::uint32_t slow_ns = 160;
constexpr std::uint32_t fast_ns = 120;

#if defined(__x86_64__)
constexpr bool has_streaming_stores = true;
#else
constexpr bool has_streaming_stores = false;
#endif

}  // namespace

#if defined(__x86_64__)

void copy_streaming(std::byte* dst, const std::byte* src, std::size_t nbytes) {
  constexpr std::size_t line = 64;
  const std::size_t lead = std::min(nbytes, -reinterpret_cast<std::uintptr_t>(dst) % line);
  std::memcpy(dst, src, lead);
  std::size_t done = lead;
  for (; nbytes - done >= line; done += line) {
    const auto* from = reinterpret_cast<const __m128i*>(src + done);
    auto* to = reinterpret_cast<__m128i*>(dst + done);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + done, src + done, nbytes - done);
}

void fence_streaming_stores() { _mm_sfence(); }

#else

void copy_streaming(std::byte* dst, const std::byte* src, std::size_t nbytes) { std::memcpy(dst, src, nbytes); }

void fence_streaming_stores() {}

#endif

bool StorePolicy::fill(std::byte* dst, const std::byte* src, std::size_t nbytes) {
  if (!has_streaming_stores || nbytes < least_fill) {
    std::memcpy(dst, src, nbytes);
    return false;
  }
  std::size_t done = 0;
  if (fills_until_sample_-- == 0) {
    sample(dst, src);
    done = sample_nbytes;
  }
  if (!streaming_) {
    std::memcpy(dst + done, src + done, nbytes - done);
    return false;
  }
  copy_streaming(dst + done, src + done, nbytes - done);
  return true;
}

void StorePolicy::sample(std::byte* dst, const std::byte* src) {
  using Clock = std::chrono::steady_clock;
  std::byte staged[sample_nbytes];  // so that reading the source is not measured
  std::memcpy(staged, src, sample_nbytes);
  const auto before = Clock::now();
  std::memcpy(dst, staged, sample_nbytes);
#if defined(__x86_64__)
  _mm_mfence();  // the stores have been carried out, and not only begun
#endif
  const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - before).count();
  observe(static_cast<std::uint32_t>(std::min<std::int64_t>(took, UINT32_MAX)));
}

void StorePolicy::observe(std::uint32_t ns) {
  recent_ns_[samples_++ % kept] = ns;
  const std::uint32_t limit_ns = streaming_ ? fast_ns : slow_ns;
  fills_until_sample_ = (ns > limit_ns) == streaming_ ? fills_per_sample - 1 : 0;
  streaming_ = *std::min_element(recent_ns_, recent_ns_ + kept) > limit_ns;
}

}  // namespace unisono
