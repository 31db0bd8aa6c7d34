#include "endpoint.h"

#include <algorithm>
#include <new>
#include <thread>
#include <tuple>
#include <utility>

#include "scheduling.h"
#include "signal_masked_thread.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// How long a rank waits for the word of the judges, who wait for all ranks, before it speaks for itself.
constexpr auto verdict_time = 1500ms;
// How long a library may take to let go of the memory of calls that have failed.
constexpr auto letting_go_time = 200ms;
// Looks for progress before waiting, where whoever is waited for may want this core, and where each takes a system
// call.
constexpr std::uint32_t crowded_rounds = 2;
constexpr std::uint32_t kernel_rounds = 50;

// Looks so many times for progress of what has begun, or until it is done.
template <class Begun>
void look_at(Begun& begun, std::uint32_t rounds) {
  look_for([&] { return begun.done(); }, [&] { return begun.advance(); }, rounds);
}

Header header_of(DType dtype, std::uint32_t tag, std::size_t nbytes) {
  return {0, nbytes, static_cast<std::uint32_t>(dtype), tag, 0, kind_point_to_point};
}

// As the user wrote it.
std::string call_text(Verb verb, std::optional<std::int32_t> peer, const std::string& tag) {
  const char* names[] = {"send(dest=", "recv(source=", "probe(source=", "iprobe(source="};
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
      lead_(std::make_unique<Leadership>()) {
  if (!members_.empty()) control_->recorder().name(communicator_, " in " + ranks_text(members_));
  control_->add_doorbell(doorbell_.get());
}

Endpoint::~Endpoint() {
  if (!control_->abandoned()) {
    close();
    return;
  }
  // Neither the threads that followed nor the server exist here.
  static_cast<void>(lead_.release());
  if (server_.joinable()) server_.detach();
}

std::int32_t Endpoint::job_rank(std::int32_t member) const {
  return members_.empty() ? member : members_.at(static_cast<std::size_t>(member));
}

std::int32_t Endpoint::member(std::int32_t job_rank) const {
  if (members_.empty()) return job_rank;
  const auto found = std::find(members_.begin(), members_.end(), job_rank);
  if (found == members_.end()) throw std::invalid_argument("this rank of the job is not in the communicator");
  return static_cast<std::int32_t>(found - members_.begin());
}

void Endpoint::add_channel(std::int64_t lane, std::unique_ptr<Channel> channel) {
  const std::uint32_t patience = std::max(patience_.load(), channel->patience());
  const bool asks_kernel = looks_ask_kernel_.load() || channel->asks_kernel();
  channels_.add(lane, std::move(channel));
  patience_ = patience;
  looks_ask_kernel_ = asks_kernel;
  doorbell_.ring();
}

std::string Endpoint::last_call() const {
  const auto record = control_->recorder().last(communicator_);
  return record ? *record->description : "";
}

void Endpoint::close() {
  if (!closed_.exchange(true)) control_->recorder().close(communicator_);
  take_lead();
  control_->remove_doorbell(doorbell_.get());
  give_all_up();
  for (const auto& [key, mailbox] : mailboxes_) mailbox->close();
  channels_.clear();  // first, as a message that is put aside is received into the memory of its mailbox
  mailboxes_.clear();
  lead_->give_up();
  wake_server();
  if (server_.joinable()) server_.join();
}

std::unique_ptr<Request> Endpoint::start(const CompiledCall& call, const Memory& memory, const CallSite& site) {
  auto request = std::make_unique<Request>(*this, site);
  request->call_ = &call;
  request->input_.assign(memory.input.begin(), memory.input.end());
  request->output_.assign(memory.output.begin(), memory.output.end());
  hand_in(*request);
  return request;
}

Message Message::to_send(std::int32_t peer, DType dtype, std::uint32_t tag, std::byte* data, std::size_t nbytes,
                         MemoryType memory) {
  return {peer, {Verb::send, {header_of(dtype, tag, nbytes), data, memory}}};
}

Message Message::to_receive(std::optional<std::int32_t> peer, DType dtype, std::optional<std::uint32_t> tag,
                            std::byte* data, std::size_t nbytes, MemoryType memory) {
  return {peer, {Verb::receive, {header_of(dtype, tag.value_or(0), nbytes), data, memory}, !tag}};
}

Message Message::to_probe(std::optional<std::int32_t> peer, std::optional<std::uint32_t> tag, bool once) {
  const Parcel parcel{header_of(DType::uint8, tag.value_or(0), 0), nullptr};
  return {peer, {once ? Verb::probe_once : Verb::probe, parcel, !tag}};
}

std::unique_ptr<Request> Endpoint::start(const Message& message, const CallSite& site) {
  if (message.peer) channels_.at(message.lane(), *message.peer);  // which throws if there is no such peer
  auto request = std::make_unique<Request>(*this, site);
  request->message_ = message;
  hand_in(*request);
  return request;
}

void Endpoint::hand_in(Request& request) {
  {
    const std::lock_guard lock(mutex_);
    (request.message_ ? new_messages_ : collectives_).push_back(&request);
    handed_in_.fetch_add(1);
  }
  wake_leader();
}

void Endpoint::wake_leader() const {
  if (asleep_.load()) doorbell_.ring();
}

std::uint32_t Endpoint::affordable(std::uint32_t rounds) const {
  if (crowded_) return std::min(rounds, crowded_rounds);
  return looks_ask_kernel_.load(std::memory_order_relaxed) ? std::min(rounds, kernel_rounds) : rounds;
}

bool Endpoint::try_now(const CompiledCall& call, const Memory& memory, const CallSite& site, std::uint32_t rounds,
                       std::unique_ptr<Request>& request) {
  if (!lead_->try_take()) return false;
  if (current_ != nullptr || !is_free_for_more()) {
    give_up_lead();
    return false;
  }
  const std::uint32_t sequence = next_sequence_++;
  const std::size_t record = control_->recorder().begin(communicator_, sequence, call.digest, call.description, site);
  try {
    collective_.start(call, memory, sequence, channels_);
    look_at(collective_, affordable(rounds));
  } catch (const std::exception&) {
    error_ = std::current_exception();  // dealt with when the request is driven
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
  give_up_lead();
  return true;
}

std::unique_ptr<Request> Endpoint::try_now(const Message& message, const CallSite& site, std::uint32_t rounds) {
  if (!lead_->try_take()) return nullptr;
  if (!is_free_for_more()) {
    give_up_lead();
    return nullptr;
  }
  auto request = std::make_unique<Request>(*this, site);
  request->message_ = message;
  messages_.push_back(request.get());
  try {
    begin_message(*request);
    if (request->operation_ != nullptr) look_at(*request->operation_, affordable(rounds));
  } catch (const std::exception&) {
    error_ = std::current_exception();  // dealt with when the request is driven
  }
  if (!error_ && request->operation_ != nullptr && request->operation_->done()) {
    messages_.pop_back();
    finish(*request, Outcome::done);
  }
  give_up_lead();
  return request;
}

bool Endpoint::reaches(std::int32_t peer) {
  return channels_.at(ChannelTable::sending_lane, peer).channel.load(std::memory_order_acquire) != nullptr;
}

void Endpoint::go_on(Request& request, double timeout_s) {
  set_deadline(request, timeout_s);
  {
    const std::lock_guard lock(mutex_);
    if (request.outcome() != Outcome::pending || closed_) return;
    if (server_.joinable() || start_server()) {
      request.goes_on_ = true;
      going_on_.fetch_add(1);
    }
  }
  wake_server();
  wake_leader();
}

// Returns false, and has every rank's calls fail, if no thread can be started.
bool Endpoint::start_server() {
  try {
    server_ = start_quiet_thread([this] { serve(); });
    return true;
  } catch (const std::system_error& error) {
    control_->fail({FailureKind::unavailable, rank(), -1, -1,
                    "rank " + std::to_string(rank()) + " cannot start the thread for calls that go on by themselves: " +
                        error.code().message() + " (`ulimit -u`, or pids.max of a container)"});
    return false;
  }
}

void Endpoint::withdraw(Request& request) {
  if (control_->abandoned() || request.outcome() != Outcome::pending) return;
  control_->fail(
      {FailureKind::aborted, rank(), -1, -1, "rank " + std::to_string(rank()) + " dropped a call that had not ended"});
  take_lead();
  give_all_up();
  give_up_lead();
}

// Takes over what has been handed in, moves what can be moved, and ends what is over.
bool Endpoint::drive() {
  if (unjudged_) return drive_nothing();
  bool moved = false;
  try {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (handed_in_.load() != 0) begin_messages();
    moved = advance_collectives();
    if (!messages_.empty()) moved |= advance_messages();
  } catch (const Mismatch& found) {
    mismatch(found);
  } catch (const std::bad_alloc&) {
    fail_here("rank " + std::to_string(rank()) + " has not enough memory");
  } catch (const std::system_error& error) {
    fail_here("rank " + std::to_string(rank()) + ": " + error.what(), FailureKind::unavailable);
  } catch (const std::exception& error) {  // ProtocolError, and what cannot be
    fail_here(error.what());
  }
  if (closed_ || control_->failed()) give_all_up();
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
      handed_in_.fetch_sub(1);
    }
    messages_.push_back(request);
    begin_message(*request);
  }
}

void Endpoint::begin_message(Request& request) {
  const Message& message = *request.message_;
  request.number_ = next_message_++;
  request.record_ = control_->recorder().begin_message(communicator_, static_cast<std::uint64_t>(request.number_),
                                                       peer_of(request), description_of(message), request.site_);
  if (closed_ || control_->failed()) return;  // and all will be given up
  request.operation_ = std::make_unique<PointToPoint>(mailboxes_of(message), message.posting);
}

const std::shared_ptr<const std::string>& Endpoint::description_of(const Message& message) {
  const auto said = [](const Message& each) {
    return std::tuple(each.posting.verb, each.peer, each.posting.any_tag, each.posting.parcel.header.group);
  };
  const std::uint32_t tag = message.posting.parcel.header.group;
  const auto place = 5 * static_cast<std::uint32_t>(message.peer.value_or(0)) + 3 * tag;
  Described& kept = described_[(place + static_cast<std::uint32_t>(message.posting.verb)) % described_.size()];
  if (kept.text == nullptr || said(kept.message) != said(message)) {
    const std::string shown = message.posting.any_tag ? "any" : std::to_string(tag);
    kept = {message, std::make_shared<const std::string>(call_text(message.posting.verb, message.peer, shown))};
  }
  return kept.text;
}

// That of the peer, or those of all others where it may be any.
std::vector<std::shared_ptr<Mailbox>> Endpoint::mailboxes_of(const Message& message) {
  std::vector<std::shared_ptr<Mailbox>> found;
  const std::int32_t me = member(rank());
  for (std::int32_t peer = message.peer.value_or(0); peer < (message.peer ? *message.peer + 1 : size()); ++peer) {
    if (!message.peer && peer == me) continue;
    auto& mailbox = mailboxes_[{message.lane(), peer}];
    if (!mailbox) mailbox = std::make_shared<Mailbox>(channels_.at(message.lane(), peer));
    found.push_back(mailbox);
  }
  return found;
}

// Begins the next collective that has been handed in, if there is one.
bool Endpoint::begin_collective() {
  if (handed_in_.load() == 0 || closed_ || control_->failed()) return false;
  {
    const std::lock_guard lock(mutex_);
    if (collectives_.empty()) return false;
    current_ = collectives_.front();
    collectives_.pop_front();
    handed_in_.fetch_sub(1);
  }
  const std::uint32_t sequence = next_sequence_++;
  const CompiledCall& call = *current_->call_;
  current_->sequence_ = sequence;
  current_->record_ =
      control_->recorder().begin(communicator_, sequence, call.digest, call.description, current_->site_);
  collective_.start(call, {current_->input_, current_->output_}, sequence, channels_);
  return true;
}

bool Endpoint::advance_collectives() {
  bool moved = false;
  while (current_ != nullptr || begin_collective()) {
    moved |= collective_.advance();
    if (!collective_.done()) break;
    collective_.ended();
    finish(*std::exchange(current_, nullptr), Outcome::done);
    moved = true;
  }
  return moved;
}

// Whichever message is waited for, those started before it move on: the peer may be waiting for one of them.
bool Endpoint::advance_messages() {
  bool moved = false;
  for (const auto& [place, mailbox] : mailboxes_)
    if (mailbox->advance()) moved = true;
  for (const Request* request : messages_) {
    if (request->operation_ == nullptr || request->operation_->done() || !request->operation_->looks_once()) continue;
    // One that nobody is left to answer fails, as all do that wait.
    std::vector<Blocked> on;
    request->operation_->blocked_on(on);
    if (!std::all_of(on.begin(), on.end(), [this](const Blocked& each) { return gone(each); }))
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

// The request may be gone when this returns.
void Endpoint::finish(Request& request, Outcome outcome) {
  if (request.record_) control_->recorder().end(*request.record_);
  if (request.operation_) {
    request.found_ = request.operation_->found();
    request.aside_ = request.operation_->take_aside();
  }
  request.operation_.reset();
  {
    const std::lock_guard lock(mutex_);
    if (request.goes_on_) going_on_.fetch_sub(1);
    request.outcome_.store(outcome);
  }
  ended_.fetch_add(1);
  lead_->tell();
}

void Endpoint::give_all_up() {
  std::vector<Request*> all = std::exchange(messages_, {});
  if (current_ != nullptr) all.push_back(std::exchange(current_, nullptr));
  {
    const std::lock_guard lock(mutex_);
    all.insert(all.end(), collectives_.begin(), collectives_.end());
    all.insert(all.end(), new_messages_.begin(), new_messages_.end());
    collectives_.clear();
    new_messages_.clear();
    handed_in_.store(0);
  }
  if (!all.empty() && !channels_.let_go(Clock::now() + letting_go_time)) {
    collective_.forsake_scratch();
    memory_forsaken_.store(true);
  }
  for (Request* request : all) finish(*request, Outcome::failed);
}

void Endpoint::mismatch(const Mismatch& found) {
  const std::int32_t peer = job_rank(found.peer);
  const std::string text =
      "rank " + std::to_string(rank()) + ": rank " + std::to_string(peer) + " sent " + found.what();
  const Failure failure{FailureKind::mismatch, rank(), peer, found.sequence, text};
  if (found.sequence < 0) {
    control_->fail(failure);
    return;
  }
  unjudged_ = {failure, Clock::now() + verdict_time};
  control_->report_mismatch(communicator_, members_, found.sequence, text);
}

// Waits for the judges.
bool Endpoint::drive_nothing() {
  if (!control_->failed() && Clock::now() >= unjudged_->until) control_->fail(unjudged_->failure);
  if (!closed_ && !control_->failed()) return false;
  unjudged_.reset();
  give_all_up();
  return true;
}

}  // namespace unisono
