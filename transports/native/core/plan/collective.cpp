#include "plan/collective.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/kernels.h"

namespace unisono {
namespace {

// The most bytes that local steps write while messages are under way. Writing more would delay peers and evict the
// messages from the caches.
constexpr std::uint64_t most_nbytes_meanwhile = 32 << 10;

void reduce(const Piece& piece, std::byte* dst, std::span<const std::byte* const> sources, std::int64_t count) {
  const auto elements = static_cast<std::size_t>(count);
  if (sources.size() == 1 && piece.divisor == 1) {
    if (dst != sources[0]) copy_array(dst, sources[0], elements * piece.itemsize);
    return;
  }
  if (!piece.kernel) throw std::logic_error("no kernel for this operation and element type");
  piece.kernel(dst, sources.data(), sources.size(), elements, piece.divisor);
}

// Describes how a message differs from the expected one. Counts may differ between ranks, so they are not part of the
// digest.
std::string difference(const Header& received, const Header& expected) {
  Header resized = received;
  resized.nbytes = expected.nbytes;
  if (resized != expected) return "a message of another call";
  return std::to_string(received.nbytes) + " bytes, where " + std::to_string(expected.nbytes) + " are to be received";
}

}  // namespace

void ChannelTable::add(std::int64_t lane, std::unique_ptr<Channel> channel) {
  ChannelEntry& entry = at(lane, channel->peer());
  const std::lock_guard lock(mutex_);
  if (entry.channel.load(std::memory_order_relaxed) != nullptr)
    throw std::invalid_argument("there is such a channel already");
  channel->serve(lane);
  owned_channels_.push_back(std::move(channel));
  entry.channel.store(owned_channels_.back().get(), std::memory_order_release);
}

ChannelEntry& ChannelTable::make_entry(std::int64_t lane, std::int64_t peer) {
  if (lane < receiving_lane || lane >= most_lanes || peer < 0 || static_cast<std::size_t>(peer) >= size_)
    throw std::invalid_argument("there can be no such channel");
  std::atomic<Peers*>& place = lanes_[static_cast<std::size_t>(lane - receiving_lane)];
  const std::lock_guard lock(mutex_);
  Peers* peers = place.load(std::memory_order_relaxed);
  if (peers == nullptr) {
    owned_lanes_.push_back(std::make_unique<Peers>(size_));
    peers = owned_lanes_.back().get();
    for (std::size_t i = 0; i < size_; ++i) (*peers)[i].peer = static_cast<std::int32_t>(i);
    place.store(peers, std::memory_order_release);
  }
  return (*peers)[static_cast<std::size_t>(peer)];
}

std::optional<bool> ChannelTable::accepts(std::int64_t lane, std::int64_t peer, MemoryType memory,
                                          std::uint64_t nbytes) {
  const ChannelEntry& entry = at(lane, peer);
  const std::lock_guard lock(mutex_);  // keeps the channel from being closed meanwhile
  const Channel* channel = entry.channel.load(std::memory_order_relaxed);
  return channel == nullptr ? std::nullopt : std::optional(channel->accepts(memory, nbytes));
}

std::vector<ChannelTraffic> ChannelTable::traffic() const {
  const std::lock_guard lock(mutex_);
  std::vector<ChannelTraffic> traffic;
  for (const auto& channel : owned_channels_) {
    const Counters& counted = channel->counters();
    traffic.push_back({channel->peer(),
                       channel->transport(),
                       {counted.sent_messages, counted.sent_nbytes, counted.received_messages, counted.received_nbytes,
                        counted.waited_ns}});
  }
  return traffic;
}

void ChannelTable::for_each(const std::function<void(Channel&)>& visit) const {
  const std::lock_guard lock(mutex_);
  for (const auto& channel : owned_channels_) visit(*channel);
}

bool ChannelTable::release_memory(std::chrono::steady_clock::time_point until) {
  const std::lock_guard lock(mutex_);
  bool all = true;
  for (const auto& channel : owned_channels_) all &= channel->release_memory(until);
  return all;
}

void ChannelTable::clear() {
  const std::lock_guard lock(mutex_);
  for (const auto& peers : owned_lanes_)
    for (ChannelEntry& entry : *peers) entry.channel.store(nullptr, std::memory_order_relaxed);
  owned_channels_.clear();
}

// The first calls are timed, and then one in this many.
constexpr std::uint64_t timed_at_first = 16;
constexpr std::uint64_t timed_one_in = 64;

void Collective::count() {
  const std::uint64_t before = call_->usage->calls.load(std::memory_order_relaxed);
  call_->usage->calls.store(before + 1, std::memory_order_relaxed);
  timed_ = before < timed_at_first || before % timed_one_in == 0;
  if (timed_) began_ = std::chrono::steady_clock::now();
}

void Collective::note_time() {
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began_);
  call_->usage->nanoseconds.fetch_add(static_cast<std::uint64_t>(spent.count()), std::memory_order_relaxed);
  call_->usage->timed.fetch_add(1, std::memory_order_relaxed);
}

void Collective::start(const CompiledCall& call, const Memory& memory, std::uint32_t sequence, ChannelTable& channels) {
  call_ = &call;
  channels_ = &channels;
  sequence_ = sequence;
  instances_left_ = call.program.instances();
  count();
  bind(memory);
  group_begun_ = false;
  straight_ = call.program.lanes() == 1 && call.program.segments() == 1;
  if (straight_) {
    straight_group_.group = straight_group_.segment = 0;
    return;
  }
  lanes_.resize(call.program.lanes());
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    LaneRun& run = lanes_[lane];
    run.groups = call.program.groups(lane);
    run.wave = run.next_segment = 0;
    run.groups_ended.assign(static_cast<std::size_t>(call.program.segments()), 0);
    for (auto& instance : run.active) spare_.push_back(std::move(instance));
    run.active.clear();
  }
}

void Collective::bind(const Memory& memory) {
  const Program& program = call_->program;
  if (memory.input.size() != program.extents(BufferKind::input).size() ||
      memory.output.size() != program.extents(BufferKind::output).size())
    throw std::invalid_argument("the memory has not the extents of the call");
  if (program.scratch_nbytes() > scratch_nbytes_) {
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(program.scratch_nbytes());
    scratch_nbytes_ = program.scratch_nbytes();
  }
  bases_.resize(program.bases());
  const auto scratch = std::copy(memory.output.begin(), memory.output.end(),
                                 std::copy(memory.input.begin(), memory.input.end(), bases_.begin()));
  *scratch = scratch_.get();
  loaded_ = !program.plan().maps();
  if (!loaded_) mapped_.bind(program, bases_);
}

bool Collective::advance() {
  if (!loaded_) mapped_.load();
  loaded_ = true;
  return straight_ ? advance_straight() : advance_lanes();
}

bool Collective::advance_straight() {
  bool moved = false;
  pass_ = channels_->new_pass();
  while (instances_left_ != 0) {
    if (!group_begun_) {
      straight_group_.messages.clear();
      group_begun_ = true;  // set first, because an error may leave it half begun
      begin(straight_group_, 0);
      moved = true;
    }
    if (drive(straight_group_)) moved = true;
    if (straight_group_.messages_left != 0) break;
    group_begun_ = false;
    end_instance(straight_group_);
    ++straight_group_.group;
  }
  return moved;
}

// Drives the posted instances of all lanes before it posts new ones, because a message may not overtake another one on
// its channel.
bool Collective::advance_lanes() {
  bool any = false;
  for (bool moved = true; moved && instances_left_ != 0;) {
    moved = false;
    pass_ = channels_->new_pass();
    for (LaneRun& run : lanes_) moved |= drive(run);
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane)
      while (post(lane)) moved = true;
    any |= moved;
  }
  return any;
}

// Posts the next instance (a group for one segment) of a lane if it may begin, and drives it as far as possible.
// Returns whether it was posted.
bool Collective::post(std::size_t lane) {
  LaneRun& run = lanes_[lane];
  if (!may_post(lane)) return false;
  std::unique_ptr<Instance> instance = take_instance();
  instance->segment = run.next_segment;
  instance->group = run.wave - run.next_segment;
  begin(*instance, lane);
  move_to_next(run);
  // The instance joins the active ones before it is driven, so that an error does not leave it half posted.
  run.active.push_back(std::move(instance));
  drive(*run.active.back());
  if (run.active.back()->messages_left == 0) {
    instance = std::move(run.active.back());
    run.active.pop_back();
    end(run, std::move(instance));
  }
  return true;
}

// Lists the messages of an instance.
void Collective::begin(Instance& instance, std::size_t lane) {
  instance.lane = lane;
  if (groups_ != nullptr) instance.begun_ns = GroupLog::now_ns();
  instance.work = &call_->program.work(lane, instance.group, instance.segment, instance.room);
  for (const Action& action : instance.work->actions)
    if (travels(action.opcode))
      instance.messages.emplace_back(action, channels_->at(static_cast<std::int64_t>(lane), action.peer));
  instance.messages_left = instance.messages.size();
  instance.local_pending = instance.work->actions.size() > instance.messages_left;
}

void Collective::run_local_steps(const Work& work) {
  for (const Action& action : work.actions)
    if (!travels(action.opcode)) run_local(work, action);
}

std::unique_ptr<Collective::Instance> Collective::take_instance() {
  if (spare_.empty()) return std::make_unique<Instance>();
  std::unique_ptr<Instance> instance = std::move(spare_.back());
  spare_.pop_back();
  instance->messages.clear();
  return instance;
}

bool Collective::may_post(std::size_t lane) const {
  const LaneRun& run = lanes_[lane];
  if (run.groups == 0 || run.wave >= run.groups + call_->program.segments() - 1) return false;
  const std::int64_t group = run.wave - run.next_segment;
  const auto segment = static_cast<std::size_t>(run.next_segment);
  if (run.groups_ended[segment] < group || (segment > 0 && run.groups_ended[segment - 1] <= group)) return false;
  return lanes_.size() == 1 || dependencies_ended(lane, group, segment);
}

bool Collective::dependencies_ended(std::size_t lane, std::int64_t group, std::size_t segment) const {
  const Plan& plan = call_->program.plan();
  for (const Dependency& needed : plan.dependencies(*plan.group_at(lane, group).group))
    if (lanes_[static_cast<std::size_t>(needed.lane)].groups_ended[segment] <= needed.group) return false;
  return true;
}

void Collective::move_to_next(LaneRun& run) const {
  if (run.next_segment < std::min(call_->program.segments() - 1, run.wave)) {
    ++run.next_segment;
  } else {
    ++run.wave;
    run.next_segment = std::max<std::int64_t>(0, run.wave - run.groups + 1);
  }
}

void Collective::end(LaneRun& run, std::unique_ptr<Instance> instance) {
  run.groups_ended[static_cast<std::size_t>(instance->segment)] = instance->group + 1;
  end_instance(*instance);
  spare_.push_back(std::move(instance));
}

void Collective::end_instance(const Instance& instance) {
  if (groups_ != nullptr)
    groups_->add({communicator_, sequence_, static_cast<std::int64_t>(instance.lane), instance.group, instance.segment,
                  instance.begun_ns, GroupLog::now_ns()});
  if (--instances_left_ == 0 && call_->program.plan().maps()) mapped_.store();
}

void Collective::run_local(const Work& work, const Action& action) {
  sources_.resize(action.operands - 1);
  for (std::size_t i = 0; i < action.pieces; ++i) {
    const Piece& piece = work.piece(action, i);
    const Place* places = work.places_of(action, i);
    for (std::size_t source = 0; source < sources_.size(); ++source) {
      const Place& place = places[source + 1];
      if (action.opcode >= Opcode::read) mapped_.check(place, piece.nbytes());
      sources_[source] = at(place);
    }
    if (action.past_caches && piece.divisor == 1 && at(places[0]) != sources_[0])
      copies_.copy(at(places[0]), sources_[0], piece.nbytes());
    else
      reduce(piece, at(places[0]), sources_, piece.count);
  }
}

bool Collective::drive(LaneRun& run) {
  bool moved = false;
  bool ended = false;
  for (const auto& instance : run.active) {
    moved |= drive(*instance);
    ended |= instance->messages_left == 0;
  }
  if (ended) retire(run);
  return moved || ended;
}

bool Collective::drive(Instance& instance) {
  bool moved = false;
  for (Message& message : instance.messages) {
    if (message.ended) continue;
    moved |= drive_message(instance, message);
    if (message.ended) --instance.messages_left;
  }
  const bool runs_local = instance.messages_left == 0 || instance.work->local_nbytes <= most_nbytes_meanwhile;
  if (!instance.local_pending || !runs_local) return moved;
  instance.local_pending = false;
  run_local_steps(*instance.work);
  return true;
}

// Removes the instances that have ended. Driving, which may throw, leaves them in the list: `blocked_on` needs the
// list intact after an error.
void Collective::retire(LaneRun& run) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < run.active.size(); ++i) {
    if (run.active[i]->messages_left == 0) {
      end(run, std::move(run.active[i]));
    } else {
      if (kept != i) run.active[kept] = std::move(run.active[i]);
      ++kept;
    }
  }
  run.active.resize(kept);
}

bool Collective::drive_message(const Instance& instance, Message& message) {
  const bool sends = is_sent(message.action->opcode);
  std::uint64_t& blocked = sends ? message.entry->send_blocked_in_pass : message.entry->receive_blocked_in_pass;
  Channel* channel = message.entry->channel.load(std::memory_order_acquire);
  if (blocked == pass_ || channel == nullptr) return false;
  const bool moved = sends ? drive_send(instance, message, *channel) : drive_receive(instance, message, *channel);
  if (!message.ended) blocked = pass_;
  return moved;
}

Header Collective::header_of(const Instance& instance, const Action& action) const {
  const bool flag = action.opcode >= Opcode::signal;
  return {call_->digest,
          flag ? sizeof(Flag) : action.nbytes,
          sequence_,
          static_cast<std::uint32_t>(instance.group),
          static_cast<std::uint32_t>(instance.segment),
          flag ? kind_flag : kind_collective};
}

// The payload as a whole, if it is large and lies in one piece.
Whole Collective::whole_of(const Work& work, const Action& action) const {
  if (action.nbytes < Channel::least_whole_nbytes || action.pieces != 1) return {};
  return {at(work.places_of(action, 0)[0]), work.incoming};
}

bool Collective::drive_send(const Instance& instance, Message& message, Channel& channel) {
  if (message.action->opcode == Opcode::signal) return drive_signal(instance, message, channel);
  const Work& work = *instance.work;
  const Action& action = *message.action;
  if (!message.begun && !channel.begin(header_of(instance, action), whole_of(work, action))) return false;
  bool moved = !message.begun;
  message.begun = true;
  for (; message.piece < action.pieces; ++message.piece, message.partial = 0) {
    const std::byte* data = at(work.places_of(action, message.piece)[0]);
    const std::size_t whole = work.piece(action, message.piece).nbytes();
    const std::size_t taken = channel.write(data + message.partial, whole - message.partial);
    message.partial += taken;
    moved |= taken != 0;
    if (message.partial != whole) return moved;
  }
  message.ended = channel.flush();
  return moved || message.ended;
}

// A flag fits into the slot that `begin` opens.
bool Collective::drive_signal(const Instance& instance, Message& message, Channel& channel) {
  const auto flag = mapped_.flag_for(channel);
  if (!flag || !channel.begin(header_of(instance, *message.action))) return false;
  if (channel.write(reinterpret_cast<const std::byte*>(&*flag), sizeof *flag) != sizeof *flag)
    throw std::logic_error("a flag went in part");
  message.begun = message.ended = true;
  return true;
}

bool Collective::receive_flag(Message& message, Channel& channel) {
  Flag flag;
  if (channel.read(reinterpret_cast<std::byte*>(&flag), sizeof flag) != sizeof flag)
    throw ProtocolError("a flag came in part");
  mapped_.take(flag, message.action->peer, channel, bases_);
  message.ended = true;
  return true;
}

bool Collective::drive_receive(const Instance& instance, Message& message, Channel& channel) {
  if (!message.begun) {
    const Header* header = channel.front();
    if (header == nullptr) return false;
    const Header expected = header_of(instance, *message.action);
    if (*header != expected)
      throw Mismatch(channel.peer(), std::min(header->sequence, sequence_), difference(*header, expected));
    message.begun = true;
  }
  if (message.action->opcode == Opcode::wait) return receive_flag(message, channel);
  const Work& work = *instance.work;
  bool moved = false;
  if (message.action->nbytes == 0) channel.consume(0);
  while (message.piece < message.action->pieces) {
    const bool more = message.action->opcode == Opcode::recv ? receive_plain(work, message, channel)
                                                             : receive_reducing(work, message, channel);
    if (!more) return moved;
    moved = true;
  }
  message.ended = true;
  return true;
}

bool Collective::receive_plain(const Work& work, Message& message, Channel& channel) {
  std::byte* data = at(work.places_of(*message.action, message.piece)[0]);
  const std::size_t whole = work.piece(*message.action, message.piece).nbytes();
  const std::size_t remaining = whole - message.partial;
  const std::size_t got = message.action->past_caches ? channel.read_past_caches(data + message.partial, remaining)
                                                      : channel.read(data + message.partial, remaining);
  message.partial += got;
  if (message.partial == whole) {
    ++message.piece;
    message.partial = 0;
  }
  return got != 0;
}

bool Collective::receive_reducing(const Work& work, Message& message, Channel& channel) {
  const Piece& piece = work.piece(*message.action, message.piece);
  const auto available = channel.readable();
  if (available.empty()) return false;
  if (message.partial == 0 && available.size() >= piece.itemsize) {
    const std::int64_t count =
        std::min(piece.count - message.done, static_cast<std::int64_t>(available.size() / piece.itemsize));
    combine_received(work, message, available.data(), count);
    channel.consume(static_cast<std::size_t>(count) * piece.itemsize);
    return true;
  }
  // An element that arrives in two parts is assembled first.
  const std::size_t part = std::min(piece.itemsize - message.partial, available.size());
  std::memcpy(message.carry.data() + message.partial, available.data(), part);
  channel.consume(part);
  message.partial += part;
  if (message.partial == piece.itemsize) {
    message.partial = 0;
    combine_received(work, message, message.carry.data(), 1);
  }
  return true;
}

void Collective::combine_received(const Work& work, Message& message, const std::byte* received, std::int64_t count) {
  const Piece& piece = work.piece(*message.action, message.piece);
  const Place* places = work.places_of(*message.action, message.piece);
  const std::size_t offset = static_cast<std::size_t>(message.done) * piece.itemsize;
  std::array<const std::byte*, 2> sources{at(places[1]) + offset, received};
  if (message.action->received_first) std::swap(sources[0], sources[1]);
  reduce(piece, at(places[0]) + offset, sources, count);
  message.done += count;
  if (message.done == piece.count) {
    ++message.piece;
    message.done = 0;
  }
}

void Collective::blocked_on(std::vector<Blocked>& waits) const {
  if (straight_ && group_begun_) add_blocked(straight_group_, waits);
  if (straight_) return;
  for (const LaneRun& run : lanes_)
    for (const auto& instance : run.active) add_blocked(*instance, waits);
}

void Collective::add_blocked(const Instance& instance, std::vector<Blocked>& waits) {
  for (const Message& message : instance.messages) {
    if (message.ended) continue;
    const bool sends = is_sent(message.action->opcode);
    waits.push_back({message.entry->channel.load(std::memory_order_acquire), message.entry->peer, sends, !sends});
  }
}

}  // namespace unisono
