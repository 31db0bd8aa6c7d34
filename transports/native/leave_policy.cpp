#include "leave_policy.h"

namespace unisono {

bool LeavePolicy::leaves(std::size_t nbytes, std::uint32_t slots_ns, std::uint32_t left_ns) {
  const std::uint32_t took = left_last_ ? left_ns : slots_ns;
  if (last_ != nullptr && took != 0) last_->add(took);
  Alike& length = alike(nbytes);
  left_last_ = length.choice.is_second(length.times[0].smallest(), length.times[1].smallest());
  last_ = &length.times[left_last_ ? 1 : 0];
  return left_last_;
}

LeavePolicy::Alike& LeavePolicy::alike(std::size_t nbytes) {
  std::size_t number = 0;
  for (std::size_t most = 4 * least_nbytes; nbytes >= most && number + 1 < lengths; most *= 4) ++number;
  return alike_[number];
}

}  // namespace unisono
