#include "mapped_memory.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace unisono {

void MappedMemory::Buffer::lay(std::byte* memory, std::size_t size, bool in_arena) {
  user = place = memory;
  nbytes = size;
  if (nbytes == 0 || in_arena) return;
  if (!arena || arena->nbytes() < nbytes) {
    arena.reset();
    arena = std::make_unique<Arena>(nbytes);
  }
  place = arena->data();
}

void MappedMemory::bind(const Program& program, std::vector<std::byte*>& bases) {
  if (program.scratch_base() != 2) throw std::invalid_argument("a plan that reads peers' memory has one array each");
  program_ = &program;
  peers_nbytes_.assign(program.bases(), 0);
  auto& [input, output, scratch] = buffers_;
  const auto nbytes_of = [&](BufferKind kind) { return program.extents(kind).front().nbytes(); };
  const auto is_mapped = [](const std::byte* data, std::size_t nbytes) {
    return nbytes != 0 && find_arena(data, nbytes).id != 0;
  };
  const std::size_t input_nbytes = nbytes_of(BufferKind::input);
  const std::size_t output_nbytes = nbytes_of(BufferKind::output);
  input.lay(bases[0], input_nbytes, is_mapped(bases[0], input_nbytes));
  output.lay(bases[1], output_nbytes, is_mapped(bases[1], output_nbytes));
  // The same memory stays the same: what a rank writes to OUTPUT may be read by others as its INPUT no more.
  if (input.user == output.user && input_nbytes == output_nbytes) output.place = input.place;
  scratch.lay(nullptr, program.scratch_nbytes(), false);
  bases[0] = input.place;
  bases[1] = output.place;
  bases[2] = scratch.place;
}

void MappedMemory::load() const {
  const Buffer& input = buffers_[0];
  if (input.place != input.user) std::memcpy(input.place, input.user, input.nbytes);
}

void MappedMemory::store() const {
  const Buffer& output = buffers_[1];
  if (output.place != output.user) std::memcpy(output.user, output.place, output.nbytes);
}

std::optional<Flag> MappedMemory::flag_for(Channel& channel) const {
  Flag flag{};
  for (std::size_t kind = 0; kind < buffer_kinds; ++kind) {
    const Buffer& buffer = buffers_[kind];
    if (buffer.nbytes == 0) continue;
    const auto reference = channel.refer(buffer.place, buffer.nbytes);
    if (!reference) return std::nullopt;
    flag.references[kind] = *reference;
    flag.nbytes[kind] = buffer.nbytes;
    for (ArenaReference& other : flag.references) other.passed = reference->passed;  // all together
  }
  return flag;
}

void MappedMemory::take(const Flag& flag, std::int32_t peer, Channel& channel, std::vector<std::byte*>& bases) {
  for (std::size_t kind = 0; kind < buffer_kinds; ++kind) {
    const ArenaReference& reference = flag.references[kind];
    // Were they passed one after the other, taking the next one could unmap what has just been found.
    if (reference.passed != flag.references[0].passed) throw ProtocolError("a flag refers to memory at several times");
    const std::size_t base = program_->peer_base(peer, static_cast<BufferKind>(kind));
    const std::byte* found = flag.nbytes[kind] == 0 ? nullptr : channel.resolve(reference, flag.nbytes[kind]);
    bases[base] = const_cast<std::byte*>(found);  // mapped for reading, and a source of steps only
    peers_nbytes_[base] = flag.nbytes[kind];
  }
}

void MappedMemory::check(const Place& place, std::size_t nbytes) const {
  if (place.base <= program_->scratch_base()) return;
  const std::uint64_t known = peers_nbytes_[place.base];
  if (place.offset > known || nbytes > known - place.offset)
    throw ProtocolError("a plan reads memory of a peer that no flag of it has told of");
}

}  // namespace unisono
