#include "windows/window_server.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "system/signal_masked_thread.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

constexpr double forever = std::numeric_limits<double>::infinity();
constexpr auto lock_look_period = 200us;
constexpr std::int64_t most_elements = 1 << 20;
// Looks for progress after an answer has been started.
constexpr std::uint32_t answer_rounds = 20;

// The actions with operand arrays, and those with a result.
constexpr std::array<std::size_t, 8> operands{1, 0, 1, 1, 2, 0, 0, 0};
constexpr std::array<bool, 8> has_result{false, true, false, true, true, false, false, false};
constexpr std::array<bool, 8> is_answered{false, true, false, true, true, true, false, true};

std::size_t index_of(WindowAction action) { return static_cast<std::size_t>(action); }

}  // namespace

WindowServer::WindowServer(Endpoint& endpoint, const WindowPart& part, WindowLock& lock, OpenChannel open_channel)
    : endpoint_(endpoint), part_(part), lock_(lock), open_channel_(std::move(open_channel)) {
  thread_ = start_signal_masked_thread([this] { serve(); });
}

WindowServer::~WindowServer() {
  if (!thread_.joinable()) return;
  if (endpoint_.abandoned())  // in a forked child, the thread does not exist
    thread_.detach();
  else
    thread_.join();
}

void WindowServer::join() {
  if (thread_.joinable() && !endpoint_.abandoned()) thread_.join();
}

void WindowServer::serve() {
  while (const auto message = next_message()) {
    if (!receive(*message)) break;
    handle(message->source);
    grant_locks();
    drop_sent();
  }
  if (endpoint_.control().failed()) return;  // a dead rank may have left the part half changed
  for (const auto& [rank, exclusive] : held_) lock_.unlock(exclusive);
  held_.clear();
}

// Waits for a request. Empty once the endpoint is closed or the job has failed.
std::optional<MatchedMessage> WindowServer::next_message() {
  const auto probe = endpoint_.start(Message::to_listen(request_tag), CallSite{});
  while (probe->outcome() == Outcome::pending) {
    if (waiting_.empty()) {
      endpoint_.wait(*probe, forever, nullptr);
    } else if (endpoint_.poll(*probe) == Outcome::pending) {
      grant_locks();
      std::this_thread::sleep_for(lock_look_period);
    }
  }
  return probe->outcome() == Outcome::done ? probe->matched() : std::nullopt;
}

bool WindowServer::receive(const MatchedMessage& message) {
  const auto nbytes = static_cast<std::size_t>(message.header.nbytes);
  if (nbytes < sizeof(WindowRequest) || nbytes > most_nbytes) {
    endpoint_.control().fail({FailureKind::internal, endpoint_.rank(), -1, -1,
                              "rank " + std::to_string(endpoint_.rank()) + " got a request of " +
                                  std::to_string(nbytes) + " bytes for a window, which no request has"});
    return false;
  }
  message_.resize(nbytes);
  const auto received = endpoint_.start(
      Message::to_receive(message.source, DType::uint8, request_tag, message_.data(), nbytes), CallSite{});
  return endpoint_.wait(*received, forever, nullptr) == Outcome::done;
}

// Returns the size of the result; empty if the lengths in the request contradict the length of the message.
std::optional<std::size_t> WindowServer::result_nbytes(const WindowRequest& request) const {
  const std::size_t action = index_of(request.action);
  if (action >= operands.size() || static_cast<std::size_t>(request.dtype) >= dtype_count) return std::nullopt;
  if (request.count < 0 || request.count > most_elements) return std::nullopt;
  const auto count = static_cast<std::size_t>(request.count);
  const std::size_t nbytes = count * dtype_table[static_cast<std::size_t>(request.dtype)].itemsize;
  const std::size_t positions = request.has_indices != 0 ? count * sizeof(std::int64_t) : 0;
  if (message_.size() != sizeof request + positions + operands[action] * nbytes) return std::nullopt;
  return has_result[action] ? nbytes : 0;
}

void WindowServer::handle(std::int32_t rank) {
  WindowRequest request;
  std::memcpy(&request, message_.data(), sizeof request);
  const auto nbytes = result_nbytes(request);
  if (!nbytes) {
    endpoint_.control().fail({FailureKind::internal, endpoint_.rank(), -1, -1,
                              "rank " + std::to_string(endpoint_.rank()) +
                                  " got a request for a window whose length contradicts its content"});
    return;
  }
  reply_.assign(sizeof(WindowReply) + *nbytes, std::byte{0});
  const WindowStatus status = carry_out(request, rank, std::span(reply_).subspan(sizeof(WindowReply)));
  if (status != WindowStatus::done)
    refusals_.try_emplace(rank, WindowReply{status, request.start, request.count, part_.elements(request.dtype)});
  if (!is_answered[index_of(request.action)]) return;
  const auto refused = refusals_.extract(rank);
  answer(rank, reply_tag, refused.empty() ? WindowReply{} : refused.mapped(), *nbytes);
}

WindowStatus WindowServer::carry_out(const WindowRequest& request, std::int32_t rank, std::span<std::byte> result) {
  switch (request.action) {
    case WindowAction::flush:
      return WindowStatus::done;
    case WindowAction::lock:
      waiting_.push_back({rank, request.op != 0});
      return WindowStatus::done;
    case WindowAction::unlock:
      return release(rank, request.op != 0);
    default:
      return access(request, result);
  }
}

WindowStatus WindowServer::access(const WindowRequest& request, std::span<std::byte> result) {
  std::byte* payload = message_.data() + sizeof request;
  Selection selection{request.start, request.count, request.step};
  std::vector<std::int64_t> indices;
  if (request.has_indices != 0 && request.count != 0) {
    indices.resize(static_cast<std::size_t>(request.count));
    std::memcpy(indices.data(), payload, indices.size() * sizeof(std::int64_t));
    payload += indices.size() * sizeof(std::int64_t);
    selection.indices = indices;
  }
  const DType dtype = request.dtype;
  const Patience patience{&endpoint_.control(), forever, nullptr};  // the origin has a time limit, which fails the job
  if (!part_.holds(dtype, selection)) return WindowStatus::out_of_range;
  switch (request.action) {
    case WindowAction::put:
      part_.put(dtype, selection, payload);
      break;
    case WindowAction::get:
      part_.get(dtype, selection, result.data());
      break;
    case WindowAction::compare_and_swap:
      if (request.count != 1) return WindowStatus::wrong_operation;
      part_.compare_and_swap(dtype, selection.position(0), payload, payload + result.size(), result.data(), patience);
      break;
    default:
      if (!WindowPart::can_accumulate(dtype, request.op)) return WindowStatus::wrong_operation;
      part_.accumulate(dtype, request.op, selection, payload,
                       request.action == WindowAction::get_accumulate ? result.data() : nullptr, patience);
  }
  return WindowStatus::done;
}

WindowStatus WindowServer::release(std::int32_t rank, bool exclusive) {
  const auto held = held_.find(rank);
  if (held == held_.end() || held->second != exclusive) return WindowStatus::not_locked;
  held_.erase(held);
  lock_.unlock(exclusive);
  return WindowStatus::done;
}

// Gives the lock to the ranks that can have it now.
void WindowServer::grant_locks() {
  std::erase_if(waiting_, [this](const Waiting& waiting) {
    if (held_.contains(waiting.rank) || !lock_.try_lock(waiting.exclusive, waiting.rank)) return false;
    held_.emplace(waiting.rank, waiting.exclusive);
    reply_.assign(sizeof(WindowReply), std::byte{0});
    answer(waiting.rank, grant_tag, {});
    return true;
  });
}

// Sends the answer in hand, whose result has `nbytes`.
void WindowServer::answer(std::int32_t rank, std::uint32_t tag, const WindowReply& reply, std::size_t nbytes) {
  reply_.resize(sizeof reply + nbytes);
  std::memcpy(reply_.data(), &reply, sizeof reply);
  send(rank, tag);
}

void WindowServer::send(std::int32_t rank, std::uint32_t tag) {
  if (!endpoint_.reaches(rank) && reached_.insert(rank).second) open_channel_(rank);
  outgoing_.push_back({nullptr, std::exchange(reply_, {})});
  Outgoing& last = outgoing_.back();
  last.request =
      endpoint_.start(Message::to_send(rank, DType::uint8, tag, last.message.data(), last.message.size()), CallSite{});
  endpoint_.poll_rounds(*last.request, answer_rounds);
}

void WindowServer::drop_sent() {
  std::erase_if(outgoing_, [](const Outgoing& each) { return each.request->outcome() != Outcome::pending; });
}

}  // namespace unisono
