#include "channel.h"

#include <algorithm>
#include <cstring>

namespace unisono {

std::size_t Channel::read(std::byte* data, std::size_t nbytes, MemoryType /*memory*/) {
  std::size_t moved = 0;
  while (moved < nbytes) {
    const auto available = readable();
    if (available.empty()) break;
    const std::size_t part = std::min(available.size(), nbytes - moved);
    std::memcpy(data + moved, available.data(), part);
    consume(part);
    moved += part;
  }
  return moved;
}

std::optional<ArenaReference> Channel::refer(const std::byte*, std::size_t) { return std::nullopt; }

const std::byte* Channel::resolve(const ArenaReference&, std::uint64_t) {
  throw ProtocolError("a reference to memory arrived over a channel that cannot map any");
}

}  // namespace unisono
