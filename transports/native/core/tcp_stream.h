//! One socket of a TCP channel, with the bytes that wait to be sent and the bytes that were read ahead. No function
//! here blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache_line.h"
#include "descriptor.h"

namespace unisono {

//! A nonblocking socket with a buffer for each direction.
class TcpStream {
 public:
  //! Takes over the socket and makes it nonblocking. At most `read_ahead_nbytes` are read ahead.
  TcpStream(Descriptor socket, std::size_t read_ahead_nbytes);

  //! The file descriptor.
  int get() const { return socket_.get(); }

  //! Adds bytes to the waiting ones; they are sent before anything else.
  void append(const void* data, std::size_t nbytes);
  //! Sends the waiting bytes and then up to `nbytes` at `data`, in one system call. Returns how many bytes of `data`
  //! were taken.
  std::size_t send(const std::byte* data, std::size_t nbytes);
  //! Sends waiting bytes; true when none is waiting any more.
  bool flush();

  //! The bytes that were read ahead.
  std::span<const std::byte> staged() const { return {staging_.get() + begin_, end_ - begin_}; }
  //! Removes bytes from the front of the stage.
  void take(std::size_t nbytes) { begin_ += nbytes; }
  //! Receives up to `most` more bytes, once. First it makes room for `needed` bytes in the stage. Into an empty stage
  //! the bytes go from offset `lead` on, which is less than a cache line.
  void read_ahead(std::size_t needed, std::size_t most, std::size_t lead = 0);
  //! The offset in the stage at which a byte has the same offset in its cache line as `data`.
  std::size_t line_offset(const std::byte* data) const {
    return unisono::line_offset(reinterpret_cast<std::uintptr_t>(data), staging_.get());
  }
  //! Receives up to `nbytes` directly into `data`. Nothing may be staged.
  std::size_t receive(std::byte* data, std::size_t nbytes);

  //! Whether the peer has gone and everything that it sent has been received.
  bool closed();

 private:
  Descriptor socket_;
  bool gone_ = false;  // the peer has closed the connection, or it broke
  std::vector<std::byte> waiting_;
  std::size_t waiting_sent_ = 0;
  std::size_t capacity_;
  std::unique_ptr<std::byte[]> staging_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace unisono
