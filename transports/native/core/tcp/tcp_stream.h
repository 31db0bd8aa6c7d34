//! One stream of a TCP channel: its socket, the bytes that wait to be sent, and the bytes that were read ahead. No
//! function here blocks.
//!
//! Resuming. A connection may break although both ranks live: a switch restarts, or a firewall forgets it. The ranks
//! then connect again, and each tells the other how many bytes it has received. The sender continues with the byte
//! after that, from the history of the bytes that it has sent. The history need not reach further back than the bytes
//! that the other end's kernel has not acknowledged: bytes that a kernel has acknowledged can be received even after
//! the connection has broken. For example, a rank has sent 900 bytes, and its kernel reports that 300 of them are not
//! acknowledged. The history keeps these 300. The peer has received 700 bytes when the connection breaks, so the rank
//! sends the last 200 again. If a proxy between the ranks has acknowledged bytes that it then loses, the history does
//! not reach back to them, and the peer is lost.
//!
//! Over TLS, all counts and the history are of bytes before encryption, of which there are fewer than the kernel
//! reports. A peer cannot decrypt a record of which a part is missing, so the history reaches one record further back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "endpoint/channel.h"
#include "system/cache_line.h"
#include "system/descriptor.h"
#include "tcp/connection.h"
#include "tcp/sent_history.h"
#include "tcp/silence.h"

namespace unisono {

//! A sequence of bytes in each direction, over one connection or several after each other.
class TcpStream {
 public:
  //! Takes over the connection and makes its socket nonblocking. At most `read_ahead_nbytes` are read ahead. The
  //! history keeps at least the last `kept_nbytes`, also if the other end's kernel has acknowledged them.
  TcpStream(Connection connection, std::size_t read_ahead_nbytes, std::size_t kept_nbytes = 0);

  //! The file descriptor.
  int get() const { return socket_.get(); }

  //! Adds bytes to the waiting ones; they are sent before anything else.
  void append(const void* data, std::size_t nbytes);
  //! Sends the waiting bytes and then up to `nbytes` at `data`, without TLS in one system call. Returns how many bytes
  //! of `data` were taken. With `lasting`, the caller promises that these bytes stay unchanged until it calls
  //! `keep_lasting`. Then the history refers to them instead of copying them.
  std::size_t send(const std::byte* data, std::size_t nbytes, bool lasting = false);
  //! Sends waiting bytes; true when none is waiting any more.
  bool flush();
  //! Whether bytes wait to be sent.
  bool waits() const { return !waiting_.empty() || (tls_ != nullptr && tls_->unsent_nbytes() != 0); }
  //! The number of bytes that wait to be sent.
  std::size_t waiting_nbytes() const {
    return waiting_.size() - waiting_sent_ + (tls_ == nullptr ? 0 : tls_->unsent_nbytes());
  }
  //! Ends the promise of `send(..., lasting=true)`: from now on the caller may change the bytes that it sent. So this
  //! copies those of them that may have to be sent again.
  void keep_lasting();

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
  //! Whether bytes may have arrived that are not in the socket any more, so that waiting for it would be in vain.
  bool may_have_data() const { return tls_ != nullptr && tls_->may_have_data(); }

  //! Whether the connection has ended and everything that came over it has been received.
  bool closed();

  //! Whether the connection has ended.
  bool ended() const { return gone_; }
  //! The error that ended the connection; 0 if the peer closed it.
  int error() const { return error_; }
  //! Examines whether the other end answers (silence.h). Between two addresses of one kernel it always does.
  void look(Silence::Clock::time_point now);
  //! Forgets the times of silence that `look` has measured.
  void forget_silence() { silence_.reset(); }
  //! The times of silence that `look` has measured.
  const Silence& silence() const { return silence_; }
  //! How often the stream has been continued over another connection.
  std::uint32_t resumptions() const { return resumptions_; }
  //! Reads the bytes that have arrived over the connection, and then uses the connection no more. The connection stays
  //! open until the stream continues over another one. Otherwise the other end, which may not have noticed the break
  //! yet, would take the stream for ended.
  StreamState retire();
  //! Closes the connection and drops the bytes that were read ahead, because they are damaged. They count as not
  //! received.
  void reject();
  //! Continues over another connection with the bytes that the peer has not received. Returns false, and changes
  //! nothing, if the history does not reach back so far.
  bool resume(Connection connection, const StreamState& peer);

 private:
  void prepare(Connection connection);
  void disconnect();
  ssize_t pass_on(const std::byte* data, std::size_t nbytes);
  std::size_t arrived_nbytes() const;
  void note_end(int error);
  std::size_t kept_of(std::size_t nbytes) const;
  void remember(const std::byte* data, std::size_t nbytes);
  void remember_lasting(const std::byte* data, std::size_t nbytes);
  void make_room(std::size_t nbytes);

  Descriptor socket_;
  Descriptor former_;         // a socket that is not used any more
  std::unique_ptr<Tls> tls_;  // refers to the socket; nullptr without encryption
  bool gone_ = false;         // the peer has closed the connection, or it broke
  int error_ = 0;
  bool stays_in_the_kernel_ = false;  // no network lies between the two ends
  Silence silence_;
  std::uint32_t resumptions_ = 0;
  std::size_t kept_nbytes_;
  SentHistory history_;
  // Bytes that were sent after those in the history and are not copied: they still lie in memory of the caller,
  // unchanged.
  std::vector<std::span<const std::byte>> lasting_;
  std::size_t lasting_nbytes_ = 0;
  std::uint64_t sent_ = 0;      // bytes passed to the kernel, without those that were sent again
  std::uint64_t received_ = 0;  // bytes received, including those read ahead
  std::vector<std::byte> waiting_;
  std::size_t waiting_sent_ = 0;
  std::size_t capacity_;
  std::unique_ptr<std::byte[]> staging_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace unisono
