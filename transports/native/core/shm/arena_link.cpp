#include "shm/arena_link.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "endpoint/channel.h"

namespace unisono {
namespace {

// The most numbers of arenas that a peer may use. It is more than a process can have descriptors, so only a faulty
// peer, which never uses a number again, exceeds it.
constexpr std::size_t most_arenas = 1 << 20;

union ControlRoom {
  cmsghdr alignment;
  char bytes[CMSG_SPACE(sizeof(int))];
};

bool send_descriptor(int socket, std::uint32_t number, int descriptor) {
  iovec part{&number, sizeof number};
  ControlRoom room{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room.bytes;
  message.msg_controllen = sizeof room.bytes;
  cmsghdr* control = CMSG_FIRSTHDR(&message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(control), &descriptor, sizeof descriptor);
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof number;
}

// Receives one descriptor and its number. Returns an invalid descriptor if something else comes next.
Descriptor receive_descriptor(int socket, std::uint32_t& number) {
  iovec part{&number, sizeof number};
  ControlRoom room{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room.bytes;
  // without the padding, which would have space for a second descriptor
  message.msg_controllen = CMSG_LEN(sizeof(int));
  const auto got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  const cmsghdr* control = got < 0 ? nullptr : CMSG_FIRSTHDR(&message);
  if (got > 0 && control == nullptr && (message.msg_flags & MSG_CTRUNC) != 0)  // this process has no free descriptor
    throw std::system_error(EMFILE, std::generic_category(), "memory that a peer passed cannot be taken (`ulimit -n`)");
  if (control == nullptr || control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) return Descriptor();
  int value = -1;
  std::memcpy(&value, CMSG_DATA(control), sizeof value);
  Descriptor descriptor(value);
  return got == sizeof number ? std::move(descriptor) : Descriptor();
}

// Returns the size of the memory behind a descriptor that a peer has passed. Throws ProtocolError if a read of this
// memory could fail, because it could shrink or is no shared memory of the kernel (tmpfs).
std::size_t checked_nbytes(int memory) {
  struct stat status{};
  struct statfs system{};
  const int seals = ::fcntl(memory, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  if (!sealed || ::fstat(memory, &status) != 0 || ::fstatfs(memory, &system) != 0 || system.f_type != TMPFS_MAGIC ||
      status.st_size <= 0)
    throw ProtocolError("memory that a peer passed is not sealed");
  return static_cast<std::size_t>(status.st_size);
}

std::byte* mapped(int memory, std::size_t nbytes) {
  try {
    return map_memory(memory, nbytes, PROT_READ);
  } catch (const std::exception& error) {
    throw ProtocolError(std::string("memory that a peer passed cannot be mapped: ") + error.what());
  }
}

}  // namespace

std::optional<ArenaReference> PassedArenas::refer(const std::byte* data, std::size_t nbytes, int socket) {
  const ArenaLocation place = find_arena(data, nbytes);
  if (place.id == 0) return std::nullopt;
  const auto entry = numbers_.find(place.id);
  const auto number = entry != numbers_.end() ? std::optional(entry->second) : pass(place.id, socket);
  if (!number) return std::nullopt;
  return ArenaReference{*number, passed_, place.offset};
}

std::optional<std::uint32_t> PassedArenas::pass(std::uint64_t id, int socket) {
  std::size_t number = 0;
  while (number < ids_.size() && arena_exists(ids_[number])) ++number;
  if (number == most_arenas) return std::nullopt;
  const Descriptor memory = arena_memory(id);
  const auto sent = static_cast<std::uint32_t>(number);
  if (!memory.valid() || !send_descriptor(socket, sent, memory.get())) return std::nullopt;
  if (number == ids_.size()) ids_.push_back(0);
  numbers_.erase(ids_[number]);
  ids_[number] = id;
  numbers_[id] = sent;
  ++passed_;
  return sent;
}

const std::byte* ReceivedArenas::at(const ArenaReference& reference, std::uint64_t nbytes, int socket) {
  while (taken_ != reference.passed) take(socket);
  if (reference.number >= mappings_.size()) throw ProtocolError("a reference to memory that has not been passed");
  const Mapping& mapping = mappings_[reference.number];
  if (reference.offset > mapping.nbytes() || nbytes > mapping.nbytes() - reference.offset)
    throw ProtocolError("a reference to bytes outside the memory that has been passed");
  return static_cast<const std::byte*>(mapping.data()) + reference.offset;
}

void ReceivedArenas::take(int socket) {
  std::uint32_t number = 0;
  const Descriptor memory = receive_descriptor(socket, number);
  if (!memory.valid() || number > mappings_.size() || number >= most_arenas)
    throw ProtocolError("a reference to memory that was not passed as it should have been");
  const std::size_t nbytes = checked_nbytes(memory.get());
  std::byte* data = mapped(memory.get(), nbytes);
  if (number == mappings_.size()) mappings_.emplace_back();
  mappings_[number] = Mapping(data, nbytes);
  ++taken_;
}

}  // namespace unisono
