#include "windows/window_part.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "kernels/kernels.h"

namespace unisono {
namespace {

__extension__ typedef unsigned __int128 Word128;

// Elements that an accumulate combines at a time.
constexpr std::int64_t block_elements = 64;
constexpr std::size_t most_itemsize = 16;
// An accumulate of more elements closes the gate and combines them alone, without atomic instructions. To close it
// costs as much as the atomic instructions of about this number of elements.
constexpr std::int64_t most_elements_beside_others = 8;
// The longest time for which others wait is that of changing this much.
constexpr std::size_t most_nbytes_alone = 64 << 10;
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

// The change of elements by one accumulate.
class Change {
 public:
  Change(DType dtype, std::uint8_t op)
      : combine_(dtype, op),
        itemsize_(itemsize_of(dtype)),
        access_(access_of(itemsize_)),
        changes_(op != static_cast<std::uint8_t>(WindowOp::no_op)) {}

  // Changes at most `block_elements` elements of a selection, from its element `first` on, each by an atomic
  // instruction.
  void beside_others(std::byte* data, const Selection& selection, std::int64_t first, std::int64_t count,
                     const std::byte* operand, std::byte* result) const {
    alignas(64) Block expected;
    alignas(64) Block desired;
    std::array<std::byte*, block_elements> places;
    const auto elements = static_cast<std::size_t>(count);
    for (std::size_t i = 0; i < elements; ++i) {
      places[i] = data + static_cast<std::size_t>(selection.position(first + static_cast<std::int64_t>(i))) * itemsize_;
      access_.load(places[i], expected.data() + i * itemsize_);
    }
    if (changes_) combine_(desired.data(), expected.data(), operand, elements);
    for (std::size_t i = 0; changes_ && i < elements; ++i) {
      const std::size_t at = i * itemsize_;
      while (!access_.swap(places[i], expected.data() + at, desired.data() + at))
        combine_(desired.data() + at, expected.data() + at, operand + at, 1);
    }
    if (result != nullptr) std::memcpy(result, expected.data(), elements * itemsize_);
  }

  // Changes elements that no other operation changes at the same time.
  void alone(std::byte* place, const std::byte* operand, std::byte* result, std::int64_t count) const {
    const auto elements = static_cast<std::size_t>(count);
    if (result == nullptr) {
      if (changes_) combine_(place, place, operand, elements);
      return;
    }
    alignas(64) Block before;
    for (std::size_t first = 0; first < elements; first += block_elements) {
      const std::size_t at = first * itemsize_;
      const std::size_t block = std::min<std::size_t>(block_elements, elements - first);
      std::memcpy(before.data(), place + at, block * itemsize_);
      if (changes_) combine_(place + at, before.data(), operand + at, block);
      std::memcpy(result + at, before.data(), block * itemsize_);  // `result` may be `operand`
    }
  }

 private:
  Combination combine_;
  std::size_t itemsize_;
  AtomicAccess access_;
  bool changes_;
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

// Whether an accumulate closes the gate: its elements have no gaps and are worth it, and its arrays lie elsewhere.
bool WindowPart::takes_gate_alone(DType dtype, const Selection& selection, const std::byte* operand,
                                  const std::byte* result) const {
  if (has_gaps(selection) || selection.count <= most_elements_beside_others) return false;
  const std::byte* place = data_ + static_cast<std::size_t>(selection.start) * itemsize_of(dtype);
  const std::size_t nbytes = static_cast<std::size_t>(selection.count) * itemsize_of(dtype);
  const auto lies_elsewhere = [&](const std::byte* array) {
    const std::less_equal<> at_most;
    return array == nullptr || at_most(array + nbytes, place) || at_most(place + nbytes, array);
  };
  return lies_elsewhere(operand) && lies_elsewhere(result);
}

LockOutcome WindowPart::accumulate(DType dtype, std::uint8_t op, const Selection& selection, const std::byte* operand,
                                   std::byte* result, const Patience& patience) const {
  check(dtype, selection);
  if (!can_accumulate(dtype, op)) throw std::invalid_argument("no accumulate combines this element type so");
  const bool alone = takes_gate_alone(dtype, selection, operand, result);
  const auto itemsize = static_cast<std::int64_t>(itemsize_of(dtype));
  const std::int64_t most = alone ? static_cast<std::int64_t>(most_nbytes_alone) / itemsize : block_elements;
  const Change change(dtype, op);
  for (std::int64_t first = 0; first < selection.count; first += most) {
    const std::int64_t count = std::min(most, selection.count - first);
    const std::int64_t offset = first * itemsize;
    const LockOutcome outcome = alone ? gate_->close(patience) : gate_->enter(patience);
    if (outcome != LockOutcome::locked) return outcome;
    std::byte* after = result == nullptr ? nullptr : result + offset;
    if (alone) {
      change.alone(data_ + (selection.start + first) * itemsize, operand + offset, after, count);
      gate_->open();
    } else {
      change.beside_others(data_, selection, first, count, operand + offset, after);
      gate_->leave();
    }
  }
  return LockOutcome::locked;
}

LockOutcome WindowPart::compare_and_swap(DType dtype, std::int64_t position, const std::byte* compared,
                                         const std::byte* value, std::byte* result, const Patience& patience) const {
  check(dtype, {position, 1});
  const std::size_t itemsize = itemsize_of(dtype);
  std::array<std::byte, most_itemsize> expected;
  std::memcpy(expected.data(), compared, itemsize);
  if (const LockOutcome outcome = gate_->enter(patience); outcome != LockOutcome::locked) return outcome;
  access_of(itemsize).swap(data_ + static_cast<std::size_t>(position) * itemsize, expected.data(), value);
  gate_->leave();
  std::memcpy(result, expected.data(), itemsize);
  return LockOutcome::locked;
}

}  // namespace unisono
