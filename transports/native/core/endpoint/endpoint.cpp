#include "endpoint/endpoint.h"

#include <algorithm>
#include <new>
#include <thread>
#include <tuple>
#include <utility>

#include "system/scheduling.h"
#include "system/signal_masked_thread.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// How long a rank waits for the verdict of the judges, who ask all ranks, before it reports the failure itself.
constexpr auto verdict_time = 1500ms;
// How long a library may take to release the memory of failed calls.
constexpr auto release_time = 200ms;
// A thread looks for progress this many times before it waits. The number is small where the peer may need this core,
// and where each look takes a system call. Where other threads run on this core now and then, the looks take as long as
// the yield that would follow.
constexpr std::uint32_t crowded_rounds = 2;
constexpr std::uint32_t shared_rounds = 30;
constexpr std::uint32_t syscall_rounds = 50;

// Drives `begun` this many times, or until it is done.
template <class Begun>
void advance_for(Begun& begun, std::uint32_t rounds) {
  poll_until([&] { return begun.done(); }, [&] { return begun.advance(); }, rounds);
}

Header header_of(ElementType type, std::uint32_t tag, std::size_t nbytes, std::uint64_t shape,
                 std::uint32_t number = 0) {
  return {shape, nbytes, type.number, tag, number, kind_point_to_point};
}

// Returns the text of the call as the user wrote it.
std::string call_text(Verb verb, std::optional<std::int32_t> peer, const std::string& tag) {
  const char* names[] = {"send(dest=",    "recv(source=",   "probe(source=",    "iprobe(source=",
                         "probe(source=", "iprobe(source=", "acknowledge(dest="};
  return names[static_cast<std::size_t>(verb)] + (peer ? std::to_string(*peer) : "any") + ", tag=" + tag + ")";
}

}  // namespace

Request::~Request() { endpoint_.withdraw(*this); }

Endpoint::Endpoint(std::shared_ptr<Control> control, std::uint64_t communicator, bool crowded,
                   std::vector<std::int32_t> members)
    : control_(std::move(control)),
      communicator_(communicator),
      crowded_(crowded),
      members_(std::move(members)),
      channels_(size()),
      leadership_(std::make_unique<Leadership>()) {
  if (!members_.empty()) control_->recorder().name(communicator_, " in " + ranks_text(members_));
  collective_.record_groups(control_->recorder().groups(), communicator_);
  control_->add_doorbell(doorbell_.get());
}

Endpoint::~Endpoint() {
  if (!control_->abandoned()) {
    close();
    return;
  }
  // In a forked child, neither the followers nor the server thread exist.
  static_cast<void>(leadership_.release());
  if (server_.joinable()) server_.detach();
}

std::int32_t Endpoint::job_rank(std::int32_t member) const {
  return members_.empty() ? member : members_.at(static_cast<std::size_t>(member));
}

std::int32_t Endpoint::member(std::int32_t job_rank) const {
  if (members_.empty()) return job_rank;
  const auto position = std::find(members_.begin(), members_.end(), job_rank);
  if (position == members_.end()) throw std::invalid_argument("this rank of the job is not in the communicator");
  return static_cast<std::int32_t>(position - members_.begin());
}

void Endpoint::add_channel(std::int64_t lane, std::unique_ptr<Channel> channel) {
  const std::uint32_t extra_yields = channel->extra_yields();
  const bool polls_by_syscall = channel->polls_by_syscall();
  const std::int32_t peer = job_rank(channel->peer());
  channel->count_in(control_->recorder().memory().traffic(peer, channel->transport()));
  control_->add_channel(peer, [&] {  // one thread at a time, so none overwrites the value of another one's channel
    channels_.add(lane, std::move(channel));
    extra_yields_ = std::max(extra_yields_.load(), extra_yields);
    polls_by_syscall_ = polls_by_syscall_.load() || polls_by_syscall;
  });
  doorbell_.ring();
}

std::string Endpoint::last_call() const {
  const auto record = control_->recorder().last(communicator_);
  return record ? record->description->text : "";
}

void Endpoint::close() {
  if (!closed_.exchange(true)) control_->recorder().close(communicator_);
  take_leadership();
  control_->remove_doorbell(doorbell_.get());
  fail_all_requests();
  control_->forget_suspicions(communicator_);
  for (const auto& [key, mailbox] : mailboxes_) mailbox->close();
  background_count_.fetch_sub(std::exchange(resumed_, {}).size());
  channels_.clear();  // first, because a transfer may still write to memory of a mailbox
  mailboxes_.clear();
  leadership_->step_down();
  wake_server();
  if (server_.joinable()) server_.join();
}

std::unique_ptr<Request> Endpoint::start(const CompiledCall& call, const Memory& memory, const CallSite& site) {
  auto request = std::make_unique<Request>(*this, site, control_->recorder().now_ns());
  request->call_ = &call;
  request->input_.assign(memory.input.begin(), memory.input.end());
  request->output_.assign(memory.output.begin(), memory.output.end());
  enqueue(*request);
  return request;
}

Message Message::to_send(std::int32_t peer, ElementType type, std::uint32_t tag, std::byte* data, std::size_t nbytes,
                         MemoryType memory, std::uint64_t shape, std::uint32_t number) {
  return {peer, {Verb::send, {header_of(type, tag, nbytes, shape, number), data, memory}}};
}

Message Message::to_receive(std::optional<std::int32_t> peer, ElementType type, std::optional<std::uint32_t> tag,
                            std::byte* data, std::size_t nbytes, MemoryType memory, std::uint64_t shape, bool up_to) {
  return {peer, {Verb::receive, {header_of(type, tag.value_or(0), nbytes, shape), data, memory}, !tag, false, up_to}};
}

Message Message::to_probe(std::optional<std::int32_t> peer, std::optional<std::uint32_t> tag, bool once, bool takes) {
  constexpr Verb verbs[2][2] = {{Verb::probe, Verb::probe_once}, {Verb::take, Verb::take_once}};
  const MessageBuffer buffer{header_of(DType::uint8, tag.value_or(0), 0, 0), nullptr};
  return {peer, {verbs[takes ? 1 : 0][once ? 1 : 0], buffer, !tag}};
}

Message Message::to_acknowledge(const MatchedMessage& taken) {
  return {taken.source, {Verb::acknowledge, {acknowledgement_of(taken.header.segment), nullptr}}};
}

Message Message::to_listen(std::uint32_t tag) {
  Message message = to_probe(std::nullopt, tag, false);
  message.posting.listens = true;
  return message;
}

std::unique_ptr<Request> Endpoint::start(const Message& message, const CallSite& site) {
  if (message.peer) channels_.at(message.lane(), *message.peer);  // throws if there is no such peer
  auto request = std::make_unique<Request>(*this, site, control_->recorder().now_ns());
  request->message_ = message;
  enqueue(*request);
  return request;
}

void Endpoint::enqueue(Request& request) {
  {
    const std::lock_guard lock(mutex_);
    (request.message_ ? new_messages_ : collectives_).push_back(&request);
    queued_.fetch_add(1);
  }
  wake_leader();
}

void Endpoint::wake_leader() const {
  if (asleep_.load()) doorbell_.ring();
}

std::uint32_t Endpoint::affordable_rounds(std::uint32_t rounds) const {
  if (shares_core()) return std::min(rounds, crowded_ || !yields_help() ? crowded_rounds : shared_rounds);
  return polls_by_syscall_.load(std::memory_order_relaxed) ? std::min(rounds, syscall_rounds) : rounds;
}

bool Endpoint::try_now(const CompiledCall& call, const Memory& memory, const CallSite& site, std::uint32_t rounds,
                       std::unique_ptr<Request>& request) {
  if (!leadership_->try_take()) return false;
  if (current_ != nullptr || !can_start_now()) {
    step_down();
    return false;
  }
  const std::uint32_t sequence = next_sequence_++;
  const std::size_t record = control_->recorder().begin(communicator_, sequence, call.digest, call.description, site);
  try {
    collective_.start(call, memory, sequence, channels_);
    advance_for(collective_, affordable_rounds(rounds));
  } catch (const std::exception&) {
    error_ = std::current_exception();  // `drive` handles it
  }
  if (!error_ && collective_.done()) {
    collective_.ended();
    control_->recorder().end(record);
  } else {
    request = std::make_unique<Request>(*this, site);
    request->call_ = &call;
    request->sequence_ = sequence;
    request->record_ = record;
    current_ = request.get();
  }
  step_down();
  return true;
}

std::unique_ptr<Request> Endpoint::try_now(const Message& message, const CallSite& site, std::uint32_t rounds) {
  if (!leadership_->try_take()) return nullptr;
  if (!can_start_now()) {
    step_down();
    return nullptr;
  }
  auto request = std::make_unique<Request>(*this, site);
  request->message_ = message;
  messages_.push_back(request.get());
  try {
    begin_message(*request);
    if (request->operation_ != nullptr) advance_for(*request->operation_, affordable_rounds(rounds));
  } catch (const std::exception&) {
    error_ = std::current_exception();  // `drive` handles it
  }
  if (!error_ && request->operation_ != nullptr && request->operation_->done()) {
    messages_.pop_back();
    finish(*request, Outcome::done);
  }
  step_down();
  return request;
}

bool Endpoint::reaches(std::int32_t peer) {
  return channels_.at(ChannelTable::sending_lane, peer).channel.load(std::memory_order_acquire) != nullptr;
}

bool Endpoint::takes_from_itself(std::uint32_t tag, std::uint64_t nbytes) {
  take_leadership();
  for (int i = 0; i < 2; ++i) drive();  // begins queued calls, and then lets earlier messages find their receives
  bool takes = true;
  if (!closed_ && !control_->failed()) {  // otherwise the send raises the error
    const auto receives = mailbox(ChannelTable::receiving_lane, member(rank()));
    takes = to_itself_->has_room(nbytes) || receives->expects(header_of(DType::uint8, tag, 0, 0));
  }
  step_down();
  return takes;
}

std::optional<StreamState> Endpoint::retire_stream(std::int64_t lane, std::int32_t peer, const BrokenStream& stream) {
  take_leadership();
  Channel* channel = channels_.at(lane, peer).channel.load(std::memory_order_acquire);
  const auto state = channel == nullptr ? std::nullopt : channel->retire(stream);
  if (state) control_->expect_resumption(job_rank(peer));
  step_down();
  return state;
}

bool Endpoint::resume_stream(std::int64_t lane, std::int32_t peer, std::uint32_t stream, Connection connection,
                             const StreamState& state) {
  take_leadership();
  Channel* channel = channels_.at(lane, peer).channel.load(std::memory_order_acquire);
  const bool goes_on = channel != nullptr && channel->resume(stream, std::move(connection), state);
  if (goes_on) {
    control_->trust(job_rank(peer));  // it lives, so other broken connections to it have their own time
    if (!channel->flush() && std::find(resumed_.begin(), resumed_.end(), channel) == resumed_.end()) {
      const std::lock_guard lock(mutex_);
      if (!closed_ && (server_.joinable() || start_server())) {
        resumed_.push_back(channel);
        background_count_.fetch_add(1);
      }
    }
  }
  if (!goes_on) {
    if (channel != nullptr) suspect_for_lost_bytes(job_rank(peer));
    control_->give_up_resumption(job_rank(peer));
  }
  step_down();
  doorbell_.ring();
  return goes_on;
}

// Reports the peer as lost. Otherwise a peer that waits for the lost bytes would connect again and again. Calls of this
// rank would not notice that if none of them needs the peer.
void Endpoint::suspect_for_lost_bytes(std::int32_t peer) {
  const std::string reason =
      "the connection to rank " + std::to_string(peer) + " broke, and bytes that were sent are lost";
  control_->suspect(peer, communicator_, current_sequence(), reason, false);
}

// Sends the bytes again that peers have not received over former connections, even if no call needs the channels now.
void Endpoint::flush_resumed() {
  background_count_.fetch_sub(std::erase_if(resumed_, [](Channel* channel) { return channel->flush(); }));
}

void Endpoint::run_in_background(Request& request, double timeout_s) {
  set_deadline(request, timeout_s);
  {
    const std::lock_guard lock(mutex_);
    if (request.outcome() != Outcome::pending || closed_) return;
    if (server_.joinable() || start_server()) {
      request.in_background_ = true;
      background_count_.fetch_add(1);
    }
  }
  wake_server();
  wake_leader();
}

void Endpoint::cancel(Request& request) {
  request.cancelled_.store(true);
  wake_server();
  wake_leader();
}

// Returns false, and makes the job fail, if no thread can be started.
bool Endpoint::start_server() {
  try {
    server_ = start_signal_masked_thread([this] { serve(); });
    return true;
  } catch (const std::system_error& error) {
    control_->fail({FailureKind::unavailable, rank(), -1, -1,
                    "rank " + std::to_string(rank()) + " cannot start the thread for background calls: " +
                        error.code().message() + " (`ulimit -u`, or pids.max of a container)"});
    return false;
  }
}

void Endpoint::withdraw(Request& request) {
  if (control_->abandoned() || request.outcome() != Outcome::pending) return;
  take_leadership();
  if (request.outcome() == Outcome::pending) {  // no other thread has ended it meanwhile
    const auto& call = request.call_ ? request.call_->description : description_of(*request.message_);
    control_->fail({FailureKind::aborted, rank(), -1, -1,
                    "rank " + std::to_string(rank()) + " dropped " + call->text +
                        " before it had ended: keep what a call returns until it has ended"});
    fail_all_requests();
  }
  step_down();
}

// Begins queued requests, moves data where possible, and finishes requests that have ended.
bool Endpoint::drive() {
  if (awaited_verdict_) return await_verdict();
  bool moved = false;
  try {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (queued_.load() != 0) begin_messages();
    moved = advance_collectives();
    if (!messages_.empty()) moved |= advance_messages();
  } catch (const Mismatch& error) {
    mismatch(error);
  } catch (const std::bad_alloc&) {
    fail_here("rank " + std::to_string(rank()) + " does not have enough memory");
  } catch (const std::system_error& error) {
    fail_here("rank " + std::to_string(rank()) + ": " + error.what(), FailureKind::unavailable);
  } catch (const Corruption& error) {
    control_->fail({FailureKind::corruption, rank(), error.peer, current_sequence(), error.what()});
  } catch (const std::exception& error) {  // ProtocolError, or a defect of this library
    fail_here(error.what());
  }
  if (!resumed_.empty()) flush_resumed();
  if (closed_ || control_->failed()) fail_all_requests();
  return moved;
}

void Endpoint::fail_here(const std::string& text, FailureKind kind) {
  control_->fail({kind, rank(), -1, current_sequence(), text});
}

void Endpoint::begin_messages() {
  for (;;) {
    Request* request = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (new_messages_.empty()) return;
      request = new_messages_.front();
      new_messages_.pop_front();
      queued_.fetch_sub(1);
    }
    messages_.push_back(request);
    begin_message(*request);
  }
}

void Endpoint::begin_message(Request& request) {
  const Message& message = *request.message_;
  request.number_ = next_message_++;
  request.record_ = control_->recorder().begin_message(communicator_, static_cast<std::uint64_t>(request.number_),
                                                       peer_of(request), description_of(message), request.site_,
                                                       message.posting.buffer.header.nbytes, request.called_ns_);
  if (closed_ || control_->failed()) return;  // the request fails soon
  request.operation_ = std::make_unique<PointToPoint>(mailboxes_of(message), message.posting);
}

const SharedDescription& Endpoint::description_of(const Message& message) {
  const auto text_key = [](const Message& shown) {
    const Header& header = shown.posting.buffer.header;
    return std::tuple(shown.posting.verb, shown.peer, shown.posting.any_tag, header.group, header.sequence);
  };
  const std::uint32_t tag = message.posting.buffer.header.group;
  const auto place = 5 * static_cast<std::uint32_t>(message.peer.value_or(0)) + 3 * tag;
  CachedDescription& cached =
      descriptions_[(place + static_cast<std::uint32_t>(message.posting.verb)) % descriptions_.size()];
  if (cached.description == nullptr || text_key(cached.message) != text_key(message)) {
    const bool is_any = message.posting.any_tag || tag == any_object_tag;
    const std::string shown = is_any ? "any" : std::to_string(tag);
    Description description{call_text(message.posting.verb, message.peer, shown), "{}"};
    const bool has_type = message.sends() || message.posting.verb == Verb::receive;
    if (has_type) description.dtype = static_cast<std::int32_t>(message.posting.buffer.header.sequence);
    cached = {message, std::make_shared<const Description>(std::move(description))};
  }
  return cached.description;
}

// Returns the mailbox of the peer; for a message from any rank, the mailboxes of all ranks.
std::vector<std::shared_ptr<Mailbox>> Endpoint::mailboxes_of(const Message& message) {
  if (message.peer) return {mailbox(message.lane(), *message.peer)};
  std::vector<std::shared_ptr<Mailbox>> mailboxes;
  for (std::int32_t peer = 0; peer < size(); ++peer) mailboxes.push_back(mailbox(message.lane(), peer));
  return mailboxes;
}

std::shared_ptr<Mailbox> Endpoint::mailbox(std::int64_t lane, std::int32_t peer) {
  auto& mailbox = mailboxes_[{lane, peer}];
  if (mailbox) return mailbox;
  const bool is_own = job_rank(peer) == rank();
  if (is_own && !to_itself_) {
    to_itself_ = std::make_shared<SelfQueue>();
    channels_.add(ChannelTable::receiving_lane, make_self_channel(peer, to_itself_));
  }
  return mailbox = std::make_shared<Mailbox>(channels_.at(lane, peer), is_own ? to_itself_ : nullptr);
}

// Begins the next queued collective, if there is one.
bool Endpoint::begin_collective() {
  if (queued_.load() == 0 || closed_ || control_->failed()) return false;
  {
    const std::lock_guard lock(mutex_);
    if (collectives_.empty()) return false;
    current_ = collectives_.front();
    collectives_.pop_front();
    queued_.fetch_sub(1);
  }
  const std::uint32_t sequence = next_sequence_++;
  const CompiledCall& call = *current_->call_;
  current_->sequence_ = sequence;
  current_->record_ = control_->recorder().begin(communicator_, sequence, call.digest, call.description,
                                                 current_->site_, current_->called_ns_);
  collective_.start(call, {current_->input_, current_->output_}, sequence, channels_);
  return true;
}

bool Endpoint::advance_collectives() {
  bool moved = false;
  while (current_ != nullptr || begin_collective()) {
    if (collective_.advance()) {
      moved = true;
      record_move(*current_);
    }
    if (!collective_.done()) break;
    collective_.ended();
    finish(*std::exchange(current_, nullptr), Outcome::done);
    moved = true;
  }
  return moved;
}

void Endpoint::record_move(Request& request) {
  if (std::exchange(request.has_moved_, true) || !request.record_) return;
  control_->recorder().move(*request.record_);
}

// Drives all messages, also those for which no thread waits, because a peer may wait for one of them.
bool Endpoint::advance_messages() {
  bool moved = false;
  for (const auto& [place, mailbox] : mailboxes_)
    if (mailbox->advance()) moved = true;
  for (const Request* request : messages_) {
    if (request->operation_ == nullptr || request->operation_->done()) continue;
    if (request->cancelled_.load() && !request->operation_->matched()) request->operation_->give_up();
    if (!request->operation_->probes_once()) continue;
    // If every rank that could still send the message has gone, the probe does not end here. It fails like a call that
    // waits.
    std::vector<Blocked> on;
    request->operation_->blocked_on(on);
    if (!std::all_of(on.begin(), on.end(), [this](const Blocked& wait) { return peer_has_gone(wait); }))
      request->operation_->give_up();
  }
  const auto ended = std::stable_partition(messages_.begin(), messages_.end(), [](const Request* request) {
    return request->operation_ == nullptr || !request->operation_->done();
  });
  const std::vector<Request*> over(ended, messages_.end());
  messages_.erase(ended, messages_.end());
  for (Request* request : over) finish(*request, Outcome::done);
  return moved || !over.empty();
}

// The request may be destroyed when this returns.
void Endpoint::finish(Request& request, Outcome outcome) {
  if (request.record_)
    control_->recorder().end(*request.record_, outcome == Outcome::done ? RecordState::done : RecordState::failed);
  if (request.operation_) {
    request.matched_ = request.operation_->matched();
    request.host_copy_ = request.operation_->take_host_copy();
  }
  request.operation_.reset();
  {
    const std::lock_guard lock(mutex_);
    if (request.in_background_) background_count_.fetch_sub(1);
    request.outcome_.store(outcome);
  }
  ended_.fetch_add(1);
  leadership_->notify_followers();
}

void Endpoint::fail_all_requests() {
  std::vector<Request*> all = std::exchange(messages_, {});
  if (current_ != nullptr) all.push_back(std::exchange(current_, nullptr));
  {
    const std::lock_guard lock(mutex_);
    all.insert(all.end(), collectives_.begin(), collectives_.end());
    all.insert(all.end(), new_messages_.begin(), new_messages_.end());
    collectives_.clear();
    new_messages_.clear();
    queued_.store(0);
  }
  if (!all.empty() && !channels_.release_memory(Clock::now() + release_time)) {
    collective_.leak_scratch();
    memory_must_leak_.store(true);
  }
  for (Request* request : all) finish(*request, Outcome::failed);
}

void Endpoint::mismatch(const Mismatch& error) {
  const std::int32_t peer = job_rank(error.peer);
  const std::string text =
      "rank " + std::to_string(rank()) + ": rank " + std::to_string(peer) + " sent " + error.what();
  const Failure failure{FailureKind::mismatch, rank(), peer, error.sequence, text};
  if (error.sequence < 0) {
    control_->fail(failure);
    return;
  }
  awaited_verdict_ = {failure, Clock::now() + verdict_time};
  control_->report_mismatch(communicator_, members_, error.sequence, text);
}

// Waits for the judges' verdict.
bool Endpoint::await_verdict() {
  if (!control_->failed() && Clock::now() >= awaited_verdict_->until) control_->fail(awaited_verdict_->failure);
  if (!closed_ && !control_->failed()) return false;
  awaited_verdict_.reset();
  fail_all_requests();
  return true;
}

}  // namespace unisono
