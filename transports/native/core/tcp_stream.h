// One connected socket of a TCP channel: bytes that wait to be sent, and bytes that have been read ahead. No call
// blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache_line.h"
#include "descriptor.h"

namespace unisono {

class TcpStream {
 public:
  // Takes over the socket, and makes it nonblocking. `read_ahead_nbytes` is the most that can be read ahead.
  TcpStream(Descriptor socket, std::size_t read_ahead_nbytes);

  int get() const { return socket_.get(); }

  // Adds bytes to those that wait; they go before anything else.
  void append(const void* data, std::size_t nbytes);
  // Sends what waits and then up to `nbytes` at `data`, all in one; returns how many of the latter were taken.
  std::size_t send(const std::byte* data, std::size_t nbytes);
  // Sends what waits; true when nothing waits any more.
  bool flush();

  // What has been read ahead.
  std::span<const std::byte> staged() const { return {staging_.get() + begin_, end_ - begin_}; }
  // Removes bytes from the front of what has been read ahead.
  void take(std::size_t nbytes) { begin_ += nbytes; }
  // Looks once for up to `most` more bytes, with room for `needed` to be staged in all; if nothing is staged, they
  // begin `lead` bytes into the stage, less than a cache line.
  void read_ahead(std::size_t needed, std::size_t most, std::size_t lead = 0);
  // How far into the stage something lies in its cache line as `data` does.
  std::size_t line_offset(const std::byte* data) const {
    return unisono::line_offset(reinterpret_cast<std::uintptr_t>(data), staging_.get());
  }
  // Moves up to `nbytes` from the kernel straight to `data`; nothing may be staged.
  std::size_t receive(std::byte* data, std::size_t nbytes);

  // Whether the peer has gone, and everything that it had sent has been received.
  bool closed();

 private:
  Descriptor socket_;
  bool gone_ = false;  // the peer closed, or the connection broke
  std::vector<std::byte> waiting_;
  std::size_t waiting_sent_ = 0;
  std::size_t capacity_;
  std::unique_ptr<std::byte[]> staging_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace unisono
