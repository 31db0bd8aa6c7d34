#include "windows/window_part.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "kernels/kernels.h"

namespace unisono {
namespace {

__extension__ typedef unsigned __int128 Word128;

// Elements that an accumulate combines at a time.
constexpr std::int64_t block_elements = 64;
constexpr std::size_t most_itemsize = 16;
using Block = std::array<std::byte, block_elements * most_itemsize>;

std::size_t itemsize_of(DType dtype) { return dtype_table[static_cast<std::size_t>(dtype)].itemsize; }

template <class Word>
std::atomic_ref<Word> word_at(std::byte* place) {
  return std::atomic_ref<Word>(*reinterpret_cast<Word*>(place));
}

template <class Word>
void load_word(std::byte* place, std::byte* value) {
  const Word word = word_at<Word>(place).load();
  std::memcpy(value, &word, sizeof word);
}

template <class Word>
bool swap_word(std::byte* place, std::byte* expected, const std::byte* desired) {
  Word before;
  Word after;
  std::memcpy(&before, expected, sizeof before);
  std::memcpy(&after, desired, sizeof after);
  if (word_at<Word>(place).compare_exchange_strong(before, after)) return true;
  std::memcpy(expected, &before, sizeof before);
  return false;
}

// The instruction that swaps 16 bytes is in all x86-64 processors but the first ones of 2003. Clang would inline the
// function into others that may not use the instruction, and call a function of the compiler's library there.
#ifdef UNISONO_X86
__attribute__((target("cx16"), noinline))
#endif
Word128 swapped_wide(std::byte* place, Word128 before, Word128 after) {
  return __sync_val_compare_and_swap(reinterpret_cast<Word128*>(place), before, after);
}

// A swap of equal values is the only atomic read of 16 bytes.
template <>
void load_word<Word128>(std::byte* place, std::byte* value) {
  const Word128 word = swapped_wide(place, 0, 0);
  std::memcpy(value, &word, sizeof word);
}

template <>
bool swap_word<Word128>(std::byte* place, std::byte* expected, const std::byte* desired) {
  Word128 before;
  Word128 after;
  std::memcpy(&before, expected, sizeof before);
  std::memcpy(&after, desired, sizeof after);
  const Word128 actual = swapped_wide(place, before, after);
  std::memcpy(expected, &actual, sizeof actual);
  return actual == before;
}

// How elements of one size are read and swapped atomically. `swap` stores the actual value in `expected` on a failure.
struct AtomicAccess {
  void (*load)(std::byte* place, std::byte* value);
  bool (*swap)(std::byte* place, std::byte* expected, const std::byte* desired);
};

AtomicAccess access_of(std::size_t itemsize) {
  switch (itemsize) {
    case 1:
      return {load_word<std::uint8_t>, swap_word<std::uint8_t>};
    case 2:
      return {load_word<std::uint16_t>, swap_word<std::uint16_t>};
    case 4:
      return {load_word<std::uint32_t>, swap_word<std::uint32_t>};
    case 8:
      return {load_word<std::uint64_t>, swap_word<std::uint64_t>};
    default:
      return {load_word<Word128>, swap_word<Word128>};
  }
}

bool is_kernel(std::uint8_t op) { return op < combine_count; }

// Computes desired[i] = expected[i] ∘ operand[i].
class Combination {
 public:
  Combination(DType dtype, std::uint8_t op)
      : kernel_(is_kernel(op) ? find_kernel(dtype, static_cast<Combine>(op)) : Kernel(nullptr)),
        itemsize_(itemsize_of(dtype)),
        replaces_(op == static_cast<std::uint8_t>(WindowOp::replace)) {}

  void operator()(std::byte* desired, const std::byte* expected, const std::byte* operand, std::size_t count) const {
    if (kernel_) {
      const std::byte* sources[] = {expected, operand};
      kernel_(desired, sources, 2, count, 1);
    } else {
      std::memcpy(desired, replaces_ ? operand : expected, count * itemsize_);
    }
  }

 private:
  Kernel kernel_;
  std::size_t itemsize_;
  bool replaces_;
};

// Calls `move(place, offset)` for each element of the selection: its place in the part, and in an array without gaps.
template <class Move>
void for_each_element(std::byte* data, std::size_t itemsize, const Selection& selection, Move move) {
  std::size_t offset = 0;
  for (std::int64_t i = 0; i < selection.count; ++i, offset += itemsize)
    move(data + static_cast<std::size_t>(selection.position(i)) * itemsize, offset);
}

bool has_gaps(const Selection& selection) { return selection.step != 1 || !selection.indices.empty(); }

}  // namespace

std::int64_t WindowPart::elements(DType dtype) const { return static_cast<std::int64_t>(nbytes_ / itemsize_of(dtype)); }

bool WindowPart::holds(DType dtype, const Selection& selection) const {
  const std::int64_t most = elements(dtype);
  if (reinterpret_cast<std::uintptr_t>(data_) % itemsize_of(dtype) != 0) return false;
  if (selection.count < 0) return false;
  if (selection.count == 0) return true;
  if (!selection.indices.empty())
    return static_cast<std::uint64_t>(selection.count) == selection.indices.size() &&
           std::all_of(selection.indices.begin(), selection.indices.end(),
                       [&](std::int64_t index) { return index >= 0 && index < most; });
  std::int64_t span = 0;
  std::int64_t last = 0;
  if (__builtin_mul_overflow(selection.count - 1, selection.step, &span)) return false;
  if (__builtin_add_overflow(selection.start, span, &last)) return false;
  return selection.start >= 0 && selection.start < most && last >= 0 && last < most;
}

bool WindowPart::can_accumulate(DType dtype, std::uint8_t op) {
  if (op == static_cast<std::uint8_t>(WindowOp::replace) || op == static_cast<std::uint8_t>(WindowOp::no_op))
    return true;
  return is_kernel(op) && static_cast<bool>(find_kernel(dtype, static_cast<Combine>(op)));
}

void WindowPart::check(DType dtype, const Selection& selection) const {
  if (!holds(dtype, selection)) throw std::out_of_range("the elements are not in the window");
}

void WindowPart::put(DType dtype, const Selection& selection, const std::byte* source) const {
  check(dtype, selection);
  const std::size_t itemsize = itemsize_of(dtype);
  const std::size_t nbytes = static_cast<std::size_t>(selection.count) * itemsize;
  if (!has_gaps(selection) && nbytes != 0)
    copy_array(data_ + static_cast<std::size_t>(selection.start) * itemsize, source, nbytes);
  else
    for_each_element(data_, itemsize, selection,
                     [&](std::byte* place, std::size_t offset) { std::memcpy(place, source + offset, itemsize); });
}

void WindowPart::get(DType dtype, const Selection& selection, std::byte* target) const {
  check(dtype, selection);
  const std::size_t itemsize = itemsize_of(dtype);
  const std::size_t nbytes = static_cast<std::size_t>(selection.count) * itemsize;
  if (!has_gaps(selection) && nbytes != 0)
    copy_array(target, data_ + static_cast<std::size_t>(selection.start) * itemsize, nbytes);
  else
    for_each_element(data_, itemsize, selection, [&](const std::byte* place, std::size_t offset) {
      std::memcpy(target + offset, place, itemsize);
    });
}

void WindowPart::accumulate(DType dtype, std::uint8_t op, const Selection& selection, const std::byte* operand,
                            std::byte* result) const {
  check(dtype, selection);
  if (!can_accumulate(dtype, op)) throw std::invalid_argument("no accumulate combines this element type so");
  const std::size_t itemsize = itemsize_of(dtype);
  const AtomicAccess access = access_of(itemsize);
  const Combination combine(dtype, op);
  const bool changes = op != static_cast<std::uint8_t>(WindowOp::no_op);
  alignas(64) Block expected;
  alignas(64) Block desired;
  std::array<std::byte*, block_elements> places;
  for (std::int64_t first = 0; first < selection.count; first += block_elements) {
    const auto count = static_cast<std::size_t>(std::min(block_elements, selection.count - first));
    const std::size_t begin = static_cast<std::size_t>(first) * itemsize;
    for (std::size_t i = 0; i < count; ++i) {
      places[i] = data_ + static_cast<std::size_t>(selection.position(first + static_cast<std::int64_t>(i))) * itemsize;
      access.load(places[i], expected.data() + i * itemsize);
    }
    if (changes) combine(desired.data(), expected.data(), operand + begin, count);
    for (std::size_t i = 0; changes && i < count; ++i) {
      const std::size_t at = i * itemsize;
      while (!access.swap(places[i], expected.data() + at, desired.data() + at))
        combine(desired.data() + at, expected.data() + at, operand + begin + at, 1);
    }
    if (result != nullptr) std::memcpy(result + begin, expected.data(), count * itemsize);
  }
}

void WindowPart::compare_and_swap(DType dtype, std::int64_t position, const std::byte* compared, const std::byte* value,
                                  std::byte* result) const {
  check(dtype, {position, 1});
  const std::size_t itemsize = itemsize_of(dtype);
  std::array<std::byte, most_itemsize> expected;
  std::memcpy(expected.data(), compared, itemsize);
  access_of(itemsize).swap(data_ + static_cast<std::size_t>(position) * itemsize, expected.data(), value);
  std::memcpy(result, expected.data(), itemsize);
}

}  // namespace unisono
