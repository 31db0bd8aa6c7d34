#include "collective.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace unisono {

void ChannelTable::add(std::int64_t lane, std::unique_ptr<Channel> channel) {
  ChannelEntry& entry = at(lane, channel->peer());
  const std::lock_guard lock(mutex_);
  if (entry.channel.load(std::memory_order_relaxed) != nullptr)
    throw std::invalid_argument("there is such a channel already");
  owned_channels_.push_back(std::move(channel));
  entry.channel.store(owned_channels_.back().get(), std::memory_order_release);
}

ChannelEntry& ChannelTable::at(std::int64_t lane, std::int64_t peer) {
  if (lane < receiving_lane || lane >= most_lanes || peer < 0 || static_cast<std::size_t>(peer) >= size_)
    throw std::invalid_argument("there can be no such channel");
  std::atomic<Peers*>& place = lanes_[static_cast<std::size_t>(lane - receiving_lane)];
  Peers* peers = place.load(std::memory_order_acquire);
  if (peers == nullptr) {
    const std::lock_guard lock(mutex_);
    peers = place.load(std::memory_order_relaxed);
    if (peers == nullptr) {
      owned_lanes_.push_back(std::make_unique<Peers>(size_));
      peers = owned_lanes_.back().get();
      for (std::size_t i = 0; i < size_; ++i) (*peers)[i].peer = static_cast<std::int32_t>(i);
      place.store(peers, std::memory_order_release);
    }
  }
  return (*peers)[static_cast<std::size_t>(peer)];
}

std::vector<Channel*> ChannelTable::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Channel*> found;
  for (const auto& channel : owned_channels_) found.push_back(channel.get());
  return found;
}

void ChannelTable::clear() {
  const std::lock_guard lock(mutex_);
  for (const auto& peers : owned_lanes_)
    for (ChannelEntry& entry : *peers) entry.channel.store(nullptr, std::memory_order_relaxed);
  owned_channels_.clear();
}

void Collective::start(const CompiledCall& call, std::vector<Extent> input, std::vector<Extent> output,
                       std::uint32_t sequence, ChannelTable& channels) {
  call_ = &call;
  channels_ = &channels;
  sequence_ = sequence;
  extents_[0] = std::move(input);
  extents_[1] = std::move(output);
  memory_ = {call.plan.get(), &call.blocks, &extents_, call.segments};
  bind_scratch();
  lanes_.resize(call.plan->lanes().size());
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    LaneRun& run = lanes_[lane];
    run.groups = call.plan->lanes()[lane].groups_as_run;
    run.wave = run.next_segment = 0;
    run.groups_ended.assign(static_cast<std::size_t>(call.segments), 0);
    for (auto& instance : run.active) spare_.push_back(std::move(instance));
    run.active.clear();
  }
}

void Collective::bind_scratch() {
  auto& scratch = extents_[static_cast<std::size_t>(BufferKind::scratch)];
  scratch.clear();
  if (call_->plan->partition(BufferKind::scratch).blocks == 0) return;
  scratch = scratch_extents(memory_);
  std::size_t nbytes = 0;
  for (const Extent& extent : scratch) nbytes += static_cast<std::size_t>(extent.count) * extent.itemsize();
  if (nbytes > scratch_nbytes_) {
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(nbytes);
    scratch_nbytes_ = nbytes;
  }
  std::byte* place = scratch_.get();
  for (Extent& extent : scratch) {
    extent.data = place;
    place += static_cast<std::size_t>(extent.count) * extent.itemsize();
  }
}

bool Collective::done() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const LaneRun& run) { return run.groups_ended.back() == run.groups; });
}

bool Collective::advance() {
  bool any = false;
  for (bool moved = true; moved;) {
    moved = false;
    pass_ = channels_->new_pass();
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      while (post(lane)) moved = true;
      if (drive(lanes_[lane])) moved = true;
    }
    any |= moved;
  }
  return any;
}

bool Collective::post(std::size_t lane) {
  LaneRun& run = lanes_[lane];
  if (run.wave >= run.groups + call_->segments - 1 || run.groups == 0) return false;
  const GroupAt at = call_->plan->group_at(lane, run.wave - run.next_segment);
  if (!may_post(run, at)) return false;
  post_instance(lane, at);
  move_to_next(run, call_->segments);
  return true;
}

bool Collective::may_post(const LaneRun& run, const GroupAt& at) const {
  const std::int64_t segment = run.next_segment;
  const std::int64_t group = run.wave - segment;
  const auto index = static_cast<std::size_t>(segment);
  if (run.groups_ended[index] < group) return false;
  if (segment > 0 && run.groups_ended[index - 1] <= group) return false;
  for (const Dependency& needed : call_->plan->dependencies(*at.group))
    if (lanes_[static_cast<std::size_t>(needed.lane)].groups_ended[index] <= needed.group) return false;
  return true;
}

void Collective::move_to_next(LaneRun& run, std::int64_t segments) {
  if (run.next_segment < std::min(segments - 1, run.wave)) {
    ++run.next_segment;
  } else {
    ++run.wave;
    run.next_segment = std::max<std::int64_t>(0, run.wave - run.groups + 1);
  }
}

void Collective::post_instance(std::size_t lane, const GroupAt& at) {
  LaneRun& run = lanes_[lane];
  std::unique_ptr<Instance> instance;
  if (spare_.empty()) {
    instance = std::make_unique<Instance>();
  } else {
    instance = std::move(spare_.back());
    spare_.pop_back();
  }
  instance->segment = run.next_segment;
  instance->group = run.wave - run.next_segment;
  instance->messages.clear();
  for (const Step& step : call_->plan->steps(*at.group)) {
    if (step.opcode <= Opcode::recv_reduce)
      prepare_message(*instance, lane, step, at.iteration);
    else
      run_local(step, at.iteration, instance->segment);
  }
  instance->left = instance->messages.size();
  run.active.push_back(std::move(instance));
}

void Collective::prepare_message(Instance& instance, std::size_t lane, const Step& step, std::int64_t iteration) {
  const Plan& plan = *call_->plan;
  StepRun message{};
  message.step = &step;
  if (step.dst >= 0) message.dst = Cursor(memory_, plan.operand(step.dst), iteration, instance.segment);
  if (step.sources == 1) message.src = Cursor(memory_, plan.operand(step.first_source), iteration, instance.segment);
  const std::size_t nbytes = step.dst >= 0 ? message.dst.nbytes() : message.src.nbytes();
  if (step.opcode == Opcode::recv_reduce && message.src.nbytes() != nbytes)
    throw ProtocolError("a plan combines blocks of different lengths");
  if (nbytes == 0) return;
  const std::int64_t peer = plan.peer(step, iteration);
  message.entry = &channels_->at(static_cast<std::int64_t>(lane), peer);
  message.header = {call_->digest,
                    nbytes,
                    sequence_,
                    static_cast<std::uint32_t>(instance.group),
                    static_cast<std::uint32_t>(instance.segment),
                    kind_collective};
  instance.messages.push_back(message);
}

void Collective::run_local(const Step& step, std::int64_t iteration, std::int64_t segment) {
  const Plan& plan = *call_->plan;
  Cursor dst(memory_, plan.operand(step.dst), iteration, segment);
  std::vector<Cursor> sources;
  for (std::int64_t i = 0; i < step.sources; ++i)
    sources.emplace_back(memory_, plan.operand(step.first_source + i), iteration, segment);
  std::vector<const std::byte*> data(sources.size());
  while (!dst.at_end()) {
    const Piece piece = dst.piece();
    std::int64_t count = piece.count;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (sources[i].at_end()) throw std::logic_error("a source of a step is shorter than its destination");
      const Piece source = sources[i].piece();
      data[i] = source.data;
      count = std::min(count, source.count);
    }
    reduce(piece, data.data(), data.size(), count, step.lower);
    dst.advance(count);
    for (Cursor& source : sources) source.advance(count);
  }
}

void Collective::reduce(const Piece& dst, const std::byte* const* sources, std::size_t sources_count,
                        std::int64_t count, bool lower) const {
  const std::uint64_t divisor = lower ? call_->divisor : 1;
  const auto elements = static_cast<std::size_t>(count);
  if (sources_count == 1 && divisor == 1) {
    if (dst.data != sources[0]) std::memcpy(dst.data, sources[0], elements * dst.itemsize());
    return;
  }
  const ReduceFunction kernel = reduce_function(dst.dtype, dst.combine);
  if (kernel == nullptr) throw std::logic_error("no kernel for this operation and element type");
  kernel(dst.data, sources, sources_count, elements, divisor);
}

bool Collective::drive(LaneRun& run) {
  bool moved = false;
  for (const auto& instance : run.active) {
    for (StepRun& message : instance->messages) {
      if (message.ended) continue;
      moved |= drive_message(message);
      if (message.ended) --instance->left;
    }
  }
  return retire(run) || moved;
}

// Apart from driving, which may throw: what is active must be whole then, for it is still asked what it waits for.
bool Collective::retire(LaneRun& run) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < run.active.size(); ++i) {
    Instance& instance = *run.active[i];
    if (instance.left == 0) {
      run.groups_ended[static_cast<std::size_t>(instance.segment)] = instance.group + 1;
      spare_.push_back(std::move(run.active[i]));
    } else {
      if (kept != i) run.active[kept] = std::move(run.active[i]);
      ++kept;
    }
  }
  const bool any = kept != run.active.size();
  run.active.resize(kept);
  return any;
}

bool Collective::drive_message(StepRun& message) {
  const bool sends = message.step->opcode == Opcode::send;
  std::uint64_t& blocked = sends ? message.entry->send_blocked_in_pass : message.entry->receive_blocked_in_pass;
  Channel* channel = message.entry->channel.load(std::memory_order_acquire);
  if (blocked == pass_ || channel == nullptr) return false;
  const bool moved = sends ? drive_send(message, *channel) : drive_receive(message, *channel);
  if (!message.ended) blocked = pass_;
  return moved;
}

bool Collective::drive_send(StepRun& message, Channel& channel) {
  if (!message.begun && !channel.begin(message.header)) return false;
  bool moved = !message.begun;
  message.begun = true;
  while (!message.src.at_end()) {
    const Piece piece = message.src.piece();
    const std::size_t whole = static_cast<std::size_t>(piece.count) * piece.itemsize();
    const std::size_t taken = channel.write(piece.data + message.partial, whole - message.partial);
    if (taken == 0) return moved;
    moved = true;
    message.partial += taken;
    message.src.advance(static_cast<std::int64_t>(message.partial / piece.itemsize()));
    message.partial %= piece.itemsize();
  }
  message.ended = channel.flush();
  return moved || message.ended;
}

bool Collective::drive_receive(StepRun& message, Channel& channel) {
  if (!message.begun) {
    const Header* header = channel.front();
    if (header == nullptr) return false;
    if (*header != message.header)
      throw Mismatch(channel.peer(), std::min(header->sequence, sequence_), "a message of another call arrived");
    message.begun = true;
  }
  bool moved = false;
  while (!message.dst.at_end()) {
    const bool more =
        message.step->opcode == Opcode::recv ? receive_plain(message, channel) : receive_reducing(message, channel);
    if (!more) return moved;
    moved = true;
  }
  message.ended = true;
  return true;
}

bool Collective::receive_plain(StepRun& message, Channel& channel) {
  const Piece piece = message.dst.piece();
  const std::size_t whole = static_cast<std::size_t>(piece.count) * piece.itemsize();
  const std::size_t got = channel.read(piece.data + message.partial, whole - message.partial);
  if (got == 0) return false;
  message.partial += got;
  message.dst.advance(static_cast<std::int64_t>(message.partial / piece.itemsize()));
  message.partial %= piece.itemsize();
  return true;
}

bool Collective::receive_reducing(StepRun& message, Channel& channel) {
  const std::size_t itemsize = message.dst.piece().itemsize();
  const auto available = channel.readable();
  if (available.empty()) return false;
  if (message.partial == 0 && available.size() >= itemsize) {
    const std::int64_t count = std::min(
        {message.dst.piece().count, message.src.piece().count, static_cast<std::int64_t>(available.size() / itemsize)});
    combine_received(message, available.data(), count);
    channel.consume(static_cast<std::size_t>(count) * itemsize);
    return true;
  }
  // An element that arrives in two parts is put together first.
  const std::size_t part = std::min(itemsize - message.partial, available.size());
  std::memcpy(message.carry.data() + message.partial, available.data(), part);
  channel.consume(part);
  message.partial += part;
  if (message.partial == itemsize) {
    message.partial = 0;
    combine_received(message, message.carry.data(), 1);
  }
  return true;
}

void Collective::combine_received(StepRun& message, const std::byte* received, std::int64_t count) {
  const std::byte* own = message.src.piece().data;
  const std::byte* sources[2] = {own, received};
  if (message.step->received_first) std::swap(sources[0], sources[1]);
  reduce(message.dst.piece(), sources, 2, count, message.step->lower);
  message.dst.advance(count);
  message.src.advance(count);
}

void Collective::blocked_on(std::vector<Blocked>& found) const {
  for (const LaneRun& run : lanes_) {
    for (const auto& instance : run.active) {
      for (const StepRun& message : instance->messages) {
        if (message.ended) continue;
        const bool sends = message.step->opcode == Opcode::send;
        found.push_back({message.entry->channel.load(std::memory_order_acquire), message.entry->peer, sends, !sends});
      }
    }
  }
}

}  // namespace unisono
