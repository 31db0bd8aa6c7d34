#include "shm/store_policy.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels/kernels.h"
#include "system/cache_line.h"

namespace unisono {
namespace {

// One fill in this many is timed.
constexpr std::uint32_t fills_per_time = 8;
// There are two ways to store: ordinary and streaming stores. One timed fill in this many is a trial of the way that
// seems slower, and trials are rarer the slower it seems. At first the two ways alternate. Then trials are frequent,
// because fresh memory is slow to write by either way. They are frequent again after each change of the better way,
// which a slow moment may have caused. The first trial then comes soon, however much worse the other way seems.
constexpr std::uint32_t times_per_trial = 32;
constexpr double rarest_trials = 16;
// The choice changes only if the other way costs less than this fraction of the cost of the present way.
constexpr double clearly_better = 0.93;

}  // namespace

#if defined(__x86_64__)

void copy_streaming(std::byte* dst, const std::byte* src, std::size_t nbytes) {
  const std::size_t lead = std::min(nbytes, -reinterpret_cast<std::uintptr_t>(dst) % cache_line);
  std::memcpy(dst, src, lead);
  std::size_t done = lead;
  for (; nbytes - done >= cache_line; done += cache_line) {
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

bool Choice::is_second(std::uint32_t first_cost, std::uint32_t second_cost) {
  if (decisions_ < first_trials) return decisions_++ / burst_ % 2 != 0;
  const double better = second_ ? second_cost : first_cost;
  const double other = second_ ? first_cost : second_cost;
  if (other != 0 && other < better * clearly_better) {
    since_trial_ = 0;
    times_between_ = fewest_between;
    return second_ = !second_;
  }
  const bool is_new = times_between_ == fewest_between;
  const double worse = better == 0 || is_new ? 1 : std::clamp(other / better, 1.0, rarest_trials);
  if (trials_remaining_ == 0) {
    if (++since_trial_ < times_between_ * burst_ * worse) return second_;
    since_trial_ = 0;
    trials_remaining_ = burst_;
    times_between_ = std::min(2 * times_between_, times_per_trial);
  }
  --trials_remaining_;
  return !second_;
}

std::uint32_t StorePolicy::cost(Stores stores, const ReadTimes& read) const {
  const auto way = static_cast<std::size_t>(stores);
  const std::uint32_t written = written_[way].smallest();
  return written == 0 || read[way] == 0 ? 0 : written + read[way];
}

Way StorePolicy::decide(const ReadTimes& read) {
  const bool streams = streaming_.is_second(cost(Stores::ordinary, read), cost(Stores::streaming, read));
  usual_ = streaming_.second_is_better() ? Stores::streaming : Stores::ordinary;
  if (streaming_.settled()) untimed_remaining_ = fills_per_time - 1;
  return {streams ? Stores::streaming : Stores::ordinary, true};
}

std::chrono::nanoseconds StorePolicy::fill(std::byte* dst, const std::byte* src, std::size_t nbytes, Way way) {
  using Clock = std::chrono::steady_clock;
  const auto before = way.timed ? Clock::now() : Clock::time_point();
  if (way.stores == Stores::streaming) {
    copy_streaming(dst, src, nbytes);
    fence_streaming_stores();
  } else {
    copy_array(dst, src, nbytes);
  }
  if (!way.timed) return {};
  const std::chrono::nanoseconds took = Clock::now() - before;
  observe(way.stores, took, nbytes);
  return took;
}

void StorePolicy::copy(std::byte* dst, const std::byte* src, std::size_t nbytes, const ReadTimes& read) {
  constexpr std::size_t most_at_once = 64 << 10;
  for (std::size_t done = 0; done < nbytes; done += most_at_once) {
    const std::size_t part = std::min(nbytes - done, most_at_once);
    fill(dst + done, src + done, part, choose(part, [&read] { return read; }));
  }
}

}  // namespace unisono
