#include "control/frame.h"

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

// Returns the number of bytes of the UTF-8 character at `at`, or 0 if there is none.
std::size_t character_nbytes(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(at);
  const std::size_t nbytes = first < 0x80   ? 1
                             : first < 0xc2 ? 0
                             : first < 0xe0 ? 2
                             : first < 0xf0 ? 3
                             : first < 0xf5 ? 4
                                            : 0;
  if (nbytes == 0 || nbytes > text.size() - at) return 0;
  for (std::size_t i = 1; i < nbytes; ++i)
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  if (nbytes < 3) return nbytes;
  // Longer forms than necessary, halves of surrogate pairs, and numbers above the last one are no characters.
  const unsigned second = byte(at + 1);
  const bool valid = !(first == 0xe0 && second < 0xa0) && !(first == 0xed && second > 0x9f) &&
                     !(first == 0xf0 && second < 0x90) && !(first == 0xf4 && second > 0x8f);
  return valid ? nbytes : 0;
}

// Replaces bytes that are no UTF-8, because Python reads the text.
std::string readable(std::string text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t nbytes = character_nbytes(text, at);
    if (nbytes == 0) text[at] = '?';
    at += nbytes == 0 ? 1 : nbytes;
  }
  return text;
}

// Whether the text is cut at `at` within a character.
bool is_within_character(std::string_view text, std::size_t at) {
  return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
}

}  // namespace

std::string encode(const Frame& frame) {
  std::size_t text_nbytes = most_text;
  while (text_nbytes > 0 && is_within_character(frame.text, text_nbytes)) --text_nbytes;
  const std::string_view text = std::string_view(frame.text).substr(0, text_nbytes);
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
                     fixed.members <= most_members &&
                     (fixed.type != static_cast<std::uint8_t>(FrameType::failure) || fixed.failure != 0);
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
           readable(bytes.substr(sizeof fixed, fixed.text_nbytes)),
           std::vector<std::int32_t>(fixed.members)};
  if (fixed.members != 0)
    std::memcpy(frame.members.data(), bytes.data() + sizeof fixed + fixed.text_nbytes, members_nbytes);
  bytes.erase(0, nbytes);
  return true;
}

}  // namespace unisono
