#include "frame.h"

#include <cstring>
#include <stdexcept>

namespace unisono {
namespace {

constexpr std::size_t most_text = 4096;
constexpr std::size_t most_members = 1 << 20;

struct Fixed {
  std::uint8_t type;
  std::uint8_t failure;
  std::uint8_t state;
  std::uint8_t reserved;
  std::int32_t rank;
  std::int32_t peer;
  std::int32_t waits_for;
  std::uint32_t text_nbytes;
  std::uint32_t members;
  std::uint64_t communicator;
  std::int64_t sequence;
  std::int64_t number;
  std::uint64_t digest;
  std::uint64_t time_left_us;
};

}  // namespace

std::string encode(const Frame& frame) {
  const std::string_view text = std::string_view(frame.text).substr(0, most_text);
  const Fixed fixed{static_cast<std::uint8_t>(frame.type),
                    static_cast<std::uint8_t>(frame.failure),
                    static_cast<std::uint8_t>(frame.state),
                    0,
                    frame.rank,
                    frame.peer,
                    frame.waits_for,
                    static_cast<std::uint32_t>(text.size()),
                    static_cast<std::uint32_t>(frame.members.size()),
                    frame.communicator,
                    frame.sequence,
                    frame.number,
                    frame.digest,
                    frame.time_left_us};
  std::string bytes(sizeof fixed, '\0');
  std::memcpy(bytes.data(), &fixed, sizeof fixed);
  bytes.append(text);
  return bytes.append(reinterpret_cast<const char*>(frame.members.data()), frame.members.size() * sizeof(std::int32_t));
}

bool decode(std::string& bytes, Frame& frame) {
  Fixed fixed;
  if (bytes.size() < sizeof fixed) return false;
  std::memcpy(&fixed, bytes.data(), sizeof fixed);
  const bool valid = fixed.type >= 1 && fixed.type <= static_cast<std::uint8_t>(FrameType::time) &&
                     fixed.failure <= static_cast<std::uint8_t>(FailureKind::corruption) &&
                     fixed.state <= static_cast<std::uint8_t>(CallState::forgotten) && fixed.text_nbytes <= most_text &&
                     fixed.members <= most_members;
  if (!valid) throw std::runtime_error("a frame on a control link is malformed");
  const std::size_t members_nbytes = fixed.members * sizeof(std::int32_t);
  const std::size_t nbytes = sizeof fixed + fixed.text_nbytes + members_nbytes;
  if (bytes.size() < nbytes) return false;
  frame = {static_cast<FrameType>(fixed.type),
           static_cast<FailureKind>(fixed.failure),
           static_cast<CallState>(fixed.state),
           fixed.rank,
           fixed.peer,
           fixed.waits_for,
           fixed.communicator,
           fixed.sequence,
           fixed.number,
           fixed.digest,
           fixed.time_left_us,
           bytes.substr(sizeof fixed, fixed.text_nbytes),
           std::vector<std::int32_t>(fixed.members)};
  if (fixed.members != 0)
    std::memcpy(frame.members.data(), bytes.data() + sizeof fixed + fixed.text_nbytes, members_nbytes);
  bytes.erase(0, nbytes);
  return true;
}

}  // namespace unisono
