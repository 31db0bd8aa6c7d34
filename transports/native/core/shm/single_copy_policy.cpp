#include "shm/single_copy_policy.h"

#include <utility>

namespace unisono {

bool SingleCopyPolicy::use_single_copy(std::size_t nbytes, bool combined, const Costs& costs,
                                       std::uint32_t rewrite_ns) {
  const Cost& last = costs[last_combined_];
  const std::uint32_t ns = last_single_copy_ ? last.by_single_copy : last.by_slots;
  if (last_times_ != nullptr && ns != 0) last_times_->add(last_single_copy_ ? ns + rewrite_ns_ : ns);
  rewrite_ns_ = nbytes < Channel::more_than_caches_nbytes ? rewrite_ns : 0;
  last_combined_ = combined;
  MessageClass& message_class = classes_[combined][length_class(nbytes)];
  const std::optional<bool> peer_choice = std::exchange(message_class.peer_choice, std::nullopt);
  last_single_copy_ =
      peer_choice ? *peer_choice
                  : message_class.choice.is_second(message_class.times[0].middle(), message_class.times[1].middle());
  last_times_ = &message_class.times[last_single_copy_ ? 1 : 0];
  return last_single_copy_;
}

std::size_t SingleCopyPolicy::length_class(std::size_t nbytes) {
  std::size_t number = 0;
  for (std::size_t most = 4 * least_nbytes; nbytes >= most && number + 1 < length_classes; most *= 4) ++number;
  return number;
}

}  // namespace unisono
