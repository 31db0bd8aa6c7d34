//! The format of a TCP channel: each message begins with a header of 64 little-endian bytes. If payloads are checked,
//! the CRC-32C of each block follows the block.
//!
//! The checksum of the header is fast rather than strong, because it only detects accidental damage. The handshake and
//! TLS protect against attackers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "endpoint/channel.h"

namespace unisono {

static_assert(std::endian::native == std::endian::little, "headers go over the wire as they lie in memory");

//! The header of a message on the wire.
struct WireHeader {
  static constexpr std::uint32_t right_magic = 0x4f534e55;  // "UNSO"
  static constexpr std::uint32_t checked = 1;               // flag: a checksum follows each block of the payload

  std::uint32_t magic;
  std::uint32_t checksum;  // of all bytes after it
  Header header;
  std::uint32_t epoch;   // of the job's membership
  std::uint32_t number;  // number of the message on its channel, modulo 2^32
  std::uint32_t flags;
  std::uint32_t reserved[3];

  //! The checksum that the header must have.
  std::uint32_t right_checksum() const {
    std::uint64_t words[8];
    std::memcpy(words, this, sizeof words);
    std::uint64_t hash = 0;
    for (std::size_t i = 1; i < 8; ++i) hash = std::rotl((hash ^ words[i]) * 0x9e3779b97f4a7c15, 29);
    return static_cast<std::uint32_t>(hash ^ (hash >> 32));
  }
};
static_assert(sizeof(WireHeader) == 64);

using BlockChecksum = std::uint32_t;

}  // namespace unisono
