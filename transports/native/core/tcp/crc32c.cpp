// The instruction has a throughput of one word per cycle but a latency of three cycles. So one chain of words, in which
// each word waits for the one before, uses a third of the throughput. Therefore three parts of the data are computed at
// once. The first part continues from the register of earlier data, and the other two begin with a register of zero.
//
// A CRC is linear. So the register after two parts is the XOR of two registers: the register of the second part, and
// that of the first part after as many zeros as the second part has bytes. `Move` computes it by four table lookups,
// one for each byte of the register.
#include "tcp/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace unisono {
namespace {

constexpr std::uint32_t polynomial = 0x82f63b78;  // reflected
constexpr std::size_t part_nbytes = 4096;

using Table = std::array<std::uint32_t, 256>;

constexpr Table byte_table() {
  Table table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? polynomial : 0);
    table[byte] = value;
  }
  return table;
}
constexpr Table of_byte = byte_table();

std::uint32_t by_table(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; ++i)
    crc = (crc >> 8) ^ of_byte[(crc ^ static_cast<std::uint32_t>(data[i])) & 0xff];
  return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)

#if defined(__x86_64__)
#define UNISONO_CRC_TARGET __attribute__((target("sse4.2")))
UNISONO_CRC_TARGET inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) { return _mm_crc32_u64(crc, word); }
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#else
#define UNISONO_CRC_TARGET __attribute__((target("+crc")))
UNISONO_CRC_TARGET inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
bool has_instruction() { return (::getauxval(AT_HWCAP) & (1UL << 7)) != 0; }  // HWCAP_CRC32
#endif

// Computes the CRC register after `part_nbytes` zeros from the register before them. The tables have the result for
// each value of each of its four bytes.
class Move {
 public:
  Move() {
    static constexpr std::byte zeros[part_nbytes]{};
    std::array<std::uint32_t, 32> of_bit{};
    for (std::uint32_t bit = 0; bit < 32; ++bit) of_bit[bit] = by_table(1u << bit, zeros, part_nbytes);
    for (std::uint32_t place = 0; place < 4; ++place)
      for (std::uint32_t byte = 0; byte < 256; ++byte)
        for (std::uint32_t bit = 0; bit < 8; ++bit)
          if ((byte >> bit & 1) != 0) tables_[place][byte] ^= of_bit[8 * place + bit];
  }
  std::uint64_t operator()(std::uint64_t crc) const {
    return tables_[0][crc & 0xff] ^ tables_[1][crc >> 8 & 0xff] ^ tables_[2][crc >> 16 & 0xff] ^
           tables_[3][crc >> 24 & 0xff];
  }

 private:
  std::array<Table, 4> tables_{};
};

std::uint64_t word_at(const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

UNISONO_CRC_TARGET std::uint32_t by_instruction(std::uint32_t before, const std::byte* data, std::size_t nbytes) {
  static const Move move;
  std::uint64_t crc = before;
  for (; nbytes >= 3 * part_nbytes; data += 3 * part_nbytes, nbytes -= 3 * part_nbytes) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < part_nbytes; i += 8) {
      crc = step(crc, word_at(data + i));
      second = step(second, word_at(data + part_nbytes + i));
      third = step(third, word_at(data + 2 * part_nbytes + i));
    }
    crc = move(move(crc) ^ second) ^ third;
  }
  for (; nbytes >= 8; data += 8, nbytes -= 8) crc = step(crc, word_at(data));
  return by_table(static_cast<std::uint32_t>(crc), data, nbytes);
}

#else

bool has_instruction() { return false; }
std::uint32_t by_instruction(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  return by_table(crc, data, nbytes);
}

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t before, const std::byte* data, std::size_t nbytes) {
  static const bool fast = has_instruction();
  return ~(fast ? by_instruction(~before, data, nbytes) : by_table(~before, data, nbytes));
}

}  // namespace unisono
