// `WindowServer`: carries out the operations of ranks that do not map a part of a window.
//
// Theory of operation
// -------------------
// The rank that owns the part has a thread of its own, which receives requests and takes no lock of the interpreter. So
// it serves while the program computes. A request is one message: a `WindowRequest`, then the positions if the
// selection has gaps of different sizes, then the operand. The sender keeps requests to 1 MiB, and sends a larger
// operation as several.
//
// Requests of one rank are carried out in the order in which they were sent, as MPI demands of accumulates. A request
// that has a result is answered by a `WindowReply` and the result. `put` and `accumulate` are not answered: the answer
// to a later flush says that they are done.
//
// Everything in a request is checked. A wrong one changes nothing. Its refusal, with the range, is the next answer to
// its sender.
//
// A rank that must wait for a lock is answered when it gets the lock. The thread looks for released locks every 200 us
// while there is such a rank, because ranks that share memory take and release the lock themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "endpoint/endpoint.h"
#include "windows/window_lock.h"
#include "windows/window_part.h"

namespace unisono {

//! The actions that a request asks for.
enum class WindowAction : std::uint8_t { put, get, accumulate, get_accumulate, compare_and_swap, flush, lock, unlock };

//! The beginning of a request.
struct WindowRequest {
  WindowAction action;
  DType dtype;
  std::uint8_t op;           // of an accumulate; for a lock and its release, whether it is exclusive
  std::uint8_t has_indices;  // whether `count` positions follow, as int64
  std::uint32_t reserved;
  std::int64_t start;
  std::int64_t count;
  std::int64_t step;
};
static_assert(sizeof(WindowRequest) == 32);

//! Why a request was refused.
enum class WindowStatus : std::int64_t { done, out_of_range, wrong_operation, not_locked };

//! The beginning of an answer. The range is that of the refused request.
struct WindowReply {
  WindowStatus status = WindowStatus::done;
  std::int64_t start = 0;
  std::int64_t count = 0;
  std::int64_t elements = 0;  // of the part, in elements of the request
};
static_assert(sizeof(WindowReply) == 32);

//! The thread that serves one part.
class WindowServer {
 public:
  //! Begins the channel for messages to a rank of the communicator.
  using OpenChannel = std::function<void(std::int32_t)>;

  static constexpr std::uint32_t request_tag = 1;
  static constexpr std::uint32_t reply_tag = 2;
  static constexpr std::uint32_t grant_tag = 3;
  //! The longest request: 1 MiB of operand or positions, twice, and the header.
  static constexpr std::size_t most_nbytes = (2 << 20) + sizeof(WindowRequest);

  //! Starts the thread. The endpoint, the memory of the part and the lock must outlive it. Throws std::system_error.
  WindowServer(Endpoint& endpoint, const WindowPart& part, WindowLock& lock, OpenChannel open_channel);
  ~WindowServer();
  WindowServer(const WindowServer&) = delete;
  WindowServer& operator=(const WindowServer&) = delete;

  //! Waits until the thread has ended. Its endpoint must be closed.
  void join();

 private:
  struct Waiting {
    std::int32_t rank;
    bool exclusive;
  };
  struct Outgoing {
    std::unique_ptr<Request> request;
    std::vector<std::byte> message;
  };

  void serve();
  std::optional<MatchedMessage> next_message();
  bool receive(const MatchedMessage& message);
  void handle(std::int32_t rank);
  std::optional<std::size_t> result_nbytes(const WindowRequest& request) const;
  WindowStatus carry_out(const WindowRequest& request, std::int32_t rank, std::span<std::byte> result);
  WindowStatus access(const WindowRequest& request, std::span<std::byte> result);
  WindowStatus release(std::int32_t rank, bool exclusive);
  void grant_locks();
  void answer(std::int32_t rank, std::uint32_t tag, const WindowReply& reply, std::size_t nbytes = 0);
  void send(std::int32_t rank, std::uint32_t tag);
  void drop_sent();

  Endpoint& endpoint_;
  const WindowPart part_;
  WindowLock& lock_;
  const OpenChannel open_channel_;
  // Used by the thread only.
  std::vector<std::byte> message_;                // the request in hand
  std::vector<std::byte> reply_;                  // the answer in hand, with its header
  std::map<std::int32_t, WindowReply> refusals_;  // by rank, the first one that has not been answered
  std::map<std::int32_t, bool> held_;             // by rank that holds the lock, whether exclusively
  std::deque<Waiting> waiting_;                   // for the lock
  std::set<std::int32_t> reached_;                // ranks to which a channel has been begun
  std::deque<Outgoing> outgoing_;
  std::thread thread_;
};

}  // namespace unisono
