#include "plan/mapped_memory.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/kernels.h"

namespace unisono {

template <class Each>
void MappedMemory::Buffer::for_each(Each visit) const {
  std::byte* next = place;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const std::size_t size = extents[i].nbytes();
    if (size != 0) visit(user[i], next, size);
    next += size;
  }
}

void MappedMemory::Buffer::allocate(std::size_t size) {
  nbytes = size;
  if (nbytes != 0 && (!arena || arena->nbytes() < nbytes)) {
    arena.reset();
    arena = std::make_unique<Arena>(nbytes);
  }
  place = nbytes != 0 ? arena->data() : nullptr;
}

void MappedMemory::Buffer::set_extents(std::span<std::byte*> bases, std::span<const Extent> of) {
  user.assign(bases.begin(), bases.end());
  extents = of;
  std::size_t size = 0;
  for (const Extent& extent : extents) size += extent.nbytes();
  if (size != 0 && extents.size() == 1 && find_arena(user[0], size).id != 0) {
    nbytes = size;
    place = user[0];
  } else {
    allocate(size);
  }
}

void MappedMemory::bind(const Program& program, std::vector<std::byte*>& bases) {
  program_ = &program;
  peers_nbytes_.assign(program.bases(), 0);
  auto& [input, output, scratch] = buffers_;
  const std::size_t inputs = program.extents(BufferKind::input).size();
  const std::span own = std::span(bases).first(program.scratch_base());
  input.set_extents(own.first(inputs), program.extents(BufferKind::input));
  output.set_extents(own.subspan(inputs), program.extents(BufferKind::output));
  // If INPUT and OUTPUT are one array of the caller, their arenas are one too. So peers can read this rank's INPUT only
  // until this rank writes its OUTPUT.
  if (input.user == output.user && input.nbytes == output.nbytes) output.place = input.place;
  scratch.allocate(program.scratch_nbytes());
  auto next = own.begin();
  for (const Buffer* buffer : {&input, &output}) {
    std::byte* place = buffer->place;
    for (const Extent& extent : buffer->extents) {
      *next++ = place;
      place += extent.nbytes();
    }
  }
  bases[program.scratch_base()] = scratch.place;
}

void MappedMemory::load() const {
  const Buffer& input = buffers_[0];
  if (!input.is_copied()) return;
  input.for_each([](std::byte* user, std::byte* place, std::size_t size) { copy_array(place, user, size); });
}

void MappedMemory::store() const {
  const Buffer& output = buffers_[1];
  if (!output.is_copied()) return;
  output.for_each(copy_array);
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
    for (ArenaReference& other : flag.references) other.passed = reference->passed;  // all three at the same time
  }
  return flag;
}

void MappedMemory::take(const Flag& flag, std::int32_t peer, Channel& channel, std::vector<std::byte*>& bases) {
  for (std::size_t kind = 0; kind < buffer_kinds; ++kind) {
    const ArenaReference& reference = flag.references[kind];
    // All arenas of a flag are passed together. Otherwise, receiving a later one could unmap one that was just
    // resolved.
    if (reference.passed != flag.references[0].passed)
      throw ProtocolError("the references of a flag were passed at different times");
    const std::size_t base = program_->peer_base(peer, static_cast<BufferKind>(kind));
    const std::byte* memory = flag.nbytes[kind] == 0 ? nullptr : channel.resolve(reference, flag.nbytes[kind]);
    bases[base] = const_cast<std::byte*>(memory);  // mapped for reading, and steps only read it
    peers_nbytes_[base] = flag.nbytes[kind];
  }
}

void MappedMemory::check(const Place& place, std::size_t nbytes) const {
  if (place.base <= program_->scratch_base()) return;
  const std::uint64_t known_nbytes = peers_nbytes_[place.base];
  if (place.offset > known_nbytes || nbytes > known_nbytes - place.offset)
    throw ProtocolError("a plan reads memory of a peer before any flag of the peer has announced it");
}

}  // namespace unisono
