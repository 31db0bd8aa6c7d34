#include "single_copy_policy.h"

#include <utility>

namespace unisono {

bool SingleCopyPolicy::leaves(std::size_t nbytes, bool combined, const Times& took, std::uint32_t again_ns) {
  const Took& last = took[combined_last_];
  const std::uint32_t ns = left_last_ ? last.left : last.by_slots;
  if (last_ != nullptr && ns != 0) last_->add(left_last_ ? ns + again_ns_ : ns);
  again_ns_ = nbytes < Channel::more_than_caches_nbytes ? again_ns : 0;
  combined_last_ = combined;
  Alike& alike = alike_[combined][length(nbytes)];
  const std::optional<bool> seen = std::exchange(alike.seen, std::nullopt);
  left_last_ = seen ? *seen : alike.choice.is_second(alike.times[0].middle(), alike.times[1].middle());
  last_ = &alike.times[left_last_ ? 1 : 0];
  return left_last_;
}

std::size_t SingleCopyPolicy::length(std::size_t nbytes) {
  std::size_t number = 0;
  for (std::size_t most = 4 * least_nbytes; nbytes >= most && number + 1 < lengths; most *= 4) ++number;
  return number;
}

}  // namespace unisono
