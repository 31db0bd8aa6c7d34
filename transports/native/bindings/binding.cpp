// The binding between Python and the native core. It decides nothing: it unpacks arguments, releases the interpreter's
// lock while a call waits, and returns the core's answer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cfenv>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "endpoint/endpoint.h"
#include "endpoint/message_shape.h"
#include "kernels/dtype.h"
#include "kernels/kernels.h"
#include "kernels/wire_formats.h"
#include "plan/plan.h"
#include "python_call.h"
#include "shm/arena.h"
#include "shm/shm_channel.h"
#include "started_call.h"
#include "system/core_distance.h"
#include "system/reserved_pages.h"
#include "system/signal_events.h"
#include "tagged/mpi_messenger.h"
#include "tagged/tagged_channel.h"
#include "tagged/ucx_messenger.h"
#include "tcp/crc32c.h"
#include "tcp/tcp_channel.h"
#include "xla_calls.h"

namespace nb = nanobind;
using namespace unisono;

namespace {

// A view that keeps the array's memory valid.
nb::object view_of(nb::handle array) {
  if (array.is_none()) return nb::none();
  return nb::steal(PyMemoryView_FromObject(array.ptr()));
}

nb::list views_of(nb::handle arrays) {
  nb::list views;
  for (nb::handle array : arrays) views.append(view_of(array));
  return views;
}

StartedCall start(nb::object endpoint, nb::object call, nb::handle inputs, nb::handle outputs) {
  const auto& compiled = nb::cast<const CompiledCall&>(call);
  const Operands from(compiled, BufferKind::input, inputs);
  const Operands to(compiled, BufferKind::output, outputs);
  StartedCall::Kept kept{std::move(call), views_of(inputs), views_of(outputs)};
  auto request = nb::cast<Endpoint&>(endpoint).start(compiled, {from.addresses(), to.addresses()}, call_site());
  return {std::move(endpoint), std::move(kept), std::move(request)};
}

int run(Endpoint& endpoint, const CompiledCall& call, nb::handle inputs, nb::handle outputs, double timeout_s) {
  const Operands from(call, BufferKind::input, inputs);
  const Operands to(call, BufferKind::output, outputs);
  return run_call(endpoint, call, {from.addresses(), to.addresses()}, {inputs, outputs}, call_site(), timeout_s);
}

MemoryType memory_type(int number) {
  if (number < 0 || number > static_cast<int>(MemoryType::cuda_managed))
    throw std::invalid_argument("unknown type of memory");
  return static_cast<MemoryType>(number);
}

ElementType element_type(std::uint32_t number) {
  if (!ElementType(number).is_valid()) throw std::invalid_argument("unknown element type");
  return ElementType(number);
}

StartedCall send(nb::object endpoint, int peer, std::uint32_t dtype, std::uint32_t tag, nb::handle array, int memory,
                 const std::vector<std::int64_t>& shape, bool synchronous) {
  const Buffer from(array, false);
  auto& target = nb::cast<Endpoint&>(endpoint);
  auto request =
      target.start(Message::to_send(peer, element_type(dtype), tag, from.data(), from.nbytes(), memory_type(memory),
                                    shape_code(shape), synchronous ? target.number_of_synchronous() : 0),
                   call_site());
  return {std::move(endpoint), {view_of(array)}, std::move(request)};
}

StartedCall receive(nb::object endpoint, std::optional<std::int32_t> peer, std::uint32_t dtype,
                    std::optional<std::uint32_t> tag, nb::handle array, int memory,
                    const std::vector<std::int64_t>& shape, bool up_to) {
  const Buffer to(array, true);
  auto request =
      nb::cast<Endpoint&>(endpoint).start(Message::to_receive(peer, element_type(dtype), tag, to.data(), to.nbytes(),
                                                              memory_type(memory), shape_code(shape), up_to),
                                          call_site());
  return {std::move(endpoint), {view_of(array)}, std::move(request)};
}

StartedCall probe(nb::object endpoint, std::optional<std::int32_t> peer, std::optional<std::uint32_t> tag, bool once,
                  bool takes) {
  auto request = nb::cast<Endpoint&>(endpoint).start(Message::to_probe(peer, tag, once, takes), call_site());
  return {std::move(endpoint), {}, std::move(request)};
}

// An error of the system becomes an OSError with its number, which says what has run out.
void raise_system_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
  }
}

// An arena passes its bytes to Python by the buffer protocol.
int arena_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Arena& arena = nb::cast<const Arena&>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, arena.data(), static_cast<Py_ssize_t>(arena.nbytes()), 0, flags);
}

void bind_arena(nb::module_& module) {
  static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(arena_buffer)}, {0, nullptr}};
  nb::class_<Arena>(module, "Arena", nb::type_slots(slots)).def(nb::init<std::size_t>(), nb::arg("nbytes"));
}

Blocks blocks_of(const Partition& partition, std::int64_t elements,
                 const std::vector<std::vector<std::int64_t>>& counts) {
  if (partition.counts == 0) return Blocks::in_parts(Blocks::even(elements, partition.shares()), partition.parts);
  const Blocks shares = Blocks::counted(counts.at(static_cast<std::size_t>(partition.counts)));
  if (shares.count() != partition.shares()) throw std::invalid_argument("there must be one count for each share");
  return Blocks::in_parts(shares, partition.parts);
}

// Longer times than a century count as one.
constexpr double longest_s = 3e9;

Control::Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Control::Clock::duration>(
      std::chrono::duration<double>(std::min(seconds, longest_s)));
}

// Elements, element type, operation and divisor of each extent.
using ExtentRows = std::vector<std::tuple<std::int64_t, int, int, std::uint64_t>>;

std::vector<Extent> extents_of(const ExtentRows& rows) {
  std::vector<Extent> extents;
  for (const auto& [count, dtype, combine, divisor] : rows) {
    if (count < 0) throw std::invalid_argument("element counts must not be negative");
    if (dtype < 0 || dtype >= static_cast<int>(dtype_count) || combine < 0 ||
        combine >= static_cast<int>(combine_count))
      throw std::invalid_argument("unknown element type or operation");
    extents.push_back({count, static_cast<DType>(dtype), static_cast<Combine>(combine), divisor});
  }
  return extents;
}

std::int64_t elements_of(const std::vector<Extent>& extents) {
  std::int64_t sum = 0;
  for (const Extent& extent : extents) sum += extent.count;
  return sum;
}

CompiledCall make_call(std::shared_ptr<const Plan> plan, const ExtentRows& inputs, const ExtentRows& outputs,
                       const std::vector<std::vector<std::int64_t>>& counts, std::int64_t segments,
                       std::uint64_t digest, std::string description, std::string facts, std::pair<bool, bool> shared) {
  if (segments < 1) throw std::invalid_argument("segments must be positive");
  std::array extents{extents_of(inputs), extents_of(outputs)};
  AllBlocks blocks{blocks_of(plan->partition(BufferKind::input), elements_of(extents[0]), counts),
                   blocks_of(plan->partition(BufferKind::output), elements_of(extents[1]), counts), Blocks()};
  blocks[2] = plan->scratch().like < 0 ? blocks_of(plan->partition(BufferKind::scratch), 0, counts)
                                       : scratch_blocks(plan->scratch(), blocks);
  Program program(std::move(plan), std::move(blocks), std::move(extents), segments, {shared.first, shared.second});
  const std::uint64_t nbytes = std::max(program.nbytes(BufferKind::input), program.nbytes(BufferKind::output));
  Description shown{std::move(description), std::move(facts), nbytes};
  return {std::move(program), digest, std::make_shared<const Description>(std::move(shown))};
}

std::shared_ptr<Plan> make_plan(nb::handle words) {
  const Buffer buffer(words, false);
  return std::make_shared<Plan>(
      std::span(reinterpret_cast<const std::int64_t*>(buffer.data()), buffer.nbytes() / sizeof(std::int64_t)));
}

nb::list traffic(const Endpoint& endpoint) {
  nb::list rows;
  for (const auto& [peer, transport, counts] : endpoint.traffic())
    rows.append(nb::make_tuple(peer, transport, counts[0], counts[1], counts[2], counts[3], counts[4]));
  return rows;
}

std::optional<std::pair<std::uint32_t, std::uint64_t>> to_pair(const std::optional<StreamState>& state) {
  if (!state) return std::nullopt;
  return std::pair(state->resumptions, state->received);
}

nb::list recorded_groups(Control& control) {
  nb::list groups;
  if (const GroupLog* log = control.recorder().groups())
    for (const GroupRecord& each : log->records())
      groups.append(nb::make_tuple(each.communicator, each.sequence, each.lane, each.group, each.segment, each.begun_ns,
                                   each.ended_ns));
  return groups;
}

nb::list take_lost_connections(Control& control) {
  nb::list lost;
  for (const LostConnection& each : control.take_lost_connections())
    lost.append(nb::make_tuple(each.communicator, each.lane, each.peer, each.stream.stream, each.stream.resumptions));
  return lost;
}

nb::tuple failure(const Control& control) {
  const Failure failure = control.failure();
  return nb::make_tuple(static_cast<int>(failure.kind), failure.rank, failure.peer, failure.sequence, failure.text);
}

// A copy of the memory of the flight recorder, as another process would read it.
nb::bytes recorded(Control& control) {
  const Mapping& memory = control.recorder().memory().mapping();
  return nb::bytes(memory.data(), memory.nbytes());
}

// (offset, uncertainty) of rank 0's clock in nanoseconds, or None.
nb::object measure_clock(Control& control, double limit_s) {
  std::optional<ClockOffset> clock;
  {
    const LockReleased released;
    clock = control.measure_clock(std::chrono::milliseconds(static_cast<std::int64_t>(limit_s * 1e3)));
  }
  if (!clock) return nb::none();
  return nb::make_tuple(clock->offset_ns, clock->uncertainty_ns);
}

// The last calls that have ended, as errors show them, the newest first.
std::vector<std::string> last_calls(Control& control, std::size_t most) {
  std::vector<std::string> texts;
  for (const CallRecord& call : control.recorder().last_ended(most)) {
    const bool is_message = (call.communicator & point_to_point_record) != 0;
    texts.push_back((is_message ? "" : "#" + std::to_string(call.sequence) + " ") + call.text());
  }
  return texts;
}

// dst = sources[0] ∘ sources[1] ∘ …, divided by `divisor`. It exposes the kernels to tests and measurements.
void reduce(nb::handle dst, const std::vector<nb::object>& sources, int dtype, int combine, std::uint64_t divisor) {
  const Buffer target(dst, true);
  std::vector<Buffer> held;
  std::vector<const std::byte*> data;
  for (const nb::object& source : sources) {
    held.emplace_back(source, false);
    if (held.back().nbytes() != target.nbytes()) throw std::invalid_argument("sources must be as long as dst");
    data.push_back(held.back().data());
  }
  const Kernel kernel = find_kernel(static_cast<DType>(dtype), static_cast<Combine>(combine));
  if (!kernel || data.empty()) throw std::invalid_argument("no kernel reduces this element type by this operation");
  const std::size_t count = target.nbytes() / dtype_table[static_cast<std::size_t>(dtype)].itemsize;
  const LockReleased unlocked;
  kernel(target.data(), data.data(), data.size(), count, divisor);
}

// The CRC-32C of earlier bytes, whose checksum is `before`, and of those of `x`.
std::uint32_t checksum(nb::handle x, std::uint32_t before) {
  const Buffer bytes(x, false);
  const LockReleased unlocked;
  return crc32c(before, bytes.data(), bytes.nbytes());
}

Codec codec_of(int form) {
  const Codec codec = find_codec(static_cast<DType>(form));
  if (!codec) throw std::invalid_argument("no codec has this element type");
  return codec;
}

std::size_t wire_nbytes(int form, std::size_t elements) { return codec_of(form).nbytes(elements); }

// The number of float32 in `x`. Throws std::invalid_argument if `wire` is too short for them.
std::size_t elements_coded(const Codec& codec, const Buffer& x, const Buffer& wire) {
  const std::size_t count = x.nbytes() / sizeof(float);
  if (wire.nbytes() < codec.nbytes(count)) throw std::invalid_argument("wire is too short for x");
  return count;
}

void to_wire(int form, nb::handle wire, nb::handle x, nb::handle residual) {
  const Codec codec = codec_of(form);
  const Buffer to(wire, true);
  const Buffer from(x, false);
  const Buffer residual_buffer(residual, true);
  const std::size_t count = elements_coded(codec, from, to);
  if (residual_buffer.nbytes() != from.nbytes())
    throw std::invalid_argument("x and its residual must be of one length");
  const LockReleased unlocked;
  codec.encode(to.data(), reinterpret_cast<const float*>(from.data()), reinterpret_cast<float*>(residual_buffer.data()),
               count);
}

void from_wire(int form, nb::handle x, nb::handle wire, bool adds) {
  const Codec codec = codec_of(form);
  const Buffer to(x, true);
  const Buffer from(wire, false);
  const std::size_t count = elements_coded(codec, to, from);
  const LockReleased unlocked;
  codec.decode(reinterpret_cast<float*>(to.data()), from.data(), count, adds);
}

// DefaultFloatEnvironment for a block of Python. It covers the whole environment of the C library, because numpy also
// raises exceptions of the x87 unit, which kernels do not use.
struct FloatEnvironmentBlock {
  std::fenv_t before;
};

void bind_float_environment(nb::module_& module) {
  nb::class_<FloatEnvironmentBlock>(module, "DefaultFloatEnvironment")
      .def(nb::init<>())
      .def("__enter__",
           [](FloatEnvironmentBlock& block) {
             std::fegetenv(&block.before);
             std::fesetenv(FE_DFL_ENV);
           })
      .def("__exit__", [](FloatEnvironmentBlock& block, const nb::args&) { std::fesetenv(&block.before); });
}

void bind_control(nb::module_& module) {
  nb::class_<Description>(module, "Description")
      .def(
          "__init__",
          [](Description* place, std::string text, std::string facts, std::uint64_t nbytes) {
            new (place) Description{std::move(text), std::move(facts), nbytes};
          },
          nb::arg("text"), nb::arg("facts"), nb::arg("nbytes"));
  nb::class_<Control>(module, "Control")
      .def(
          "__init__",
          [](Control* place, std::int32_t rank, std::int32_t size, std::size_t recorded, double slow_after_s,
             double lost_after_s) {
            new (place) Control(rank, size, recorded, duration_of(slow_after_s), duration_of(lost_after_s));
          },
          nb::arg("rank"), nb::arg("size"), nb::arg("recorded") = 0, nb::arg("slow_after_s") = longest_s,
          nb::arg("lost_after_s") = 3.0)
      .def("take_notices", &Control::take_notices)
      .def("take_lost_connections", take_lost_connections)
      .def("record_groups", [](Control& control) { control.recorder().record_groups(); })
      .def("recorded_groups", recorded_groups)
      .def(
          "retire_link",
          [](Control& control, int peer, std::uint32_t resumptions) {
            return to_pair(control.retire_link(peer, resumptions));
          },
          nb::arg("peer"), nb::arg("resumptions"), nb::call_guard<LockReleased>())
      .def(
          "resume_link",
          [](Control& control, int peer, Connection& connection, std::uint32_t resumptions, std::uint64_t received) {
            return control.resume_link(peer, std::move(connection), {resumptions, received});
          },
          nb::arg("peer"), nb::arg("connection"), nb::arg("resumptions"), nb::arg("received"),
          nb::call_guard<LockReleased>())
      .def("end_link", &Control::end_link, nb::arg("peer"), nb::call_guard<LockReleased>())
      .def(
          "describe", [](Control& control, const std::string& about) { control.recorder().memory().describe(about); },
          nb::arg("about"))
      .def("recorded", recorded)
      .def("last_calls", last_calls, nb::arg("most"))
      .def(
          "add_link",
          [](Control& control, int peer, Connection& connection, int process) {
            control.add_link(peer, std::move(connection), Descriptor(process));
          },
          nb::arg("peer"), nb::arg("connection"), nb::arg("process"))
      .def("failed", &Control::failed)
      .def("failure", failure)
      .def(
          "fail",
          [](Control& control, int kind, int peer, const std::string& text) {
            control.fail({static_cast<FailureKind>(kind), control.rank(), peer, -1, text});
          },
          nb::arg("kind"), nb::arg("peer"), nb::arg("text"))
      .def(
          "lose", [](Control& control, int peer, const std::string& seen) { control.lose(peer, -1, seen); },
          nb::arg("peer"), nb::arg("seen"), nb::call_guard<LockReleased>())
      .def(
          "suspect",
          [](Control& control, int peer, const std::string& seen, bool needed) {
            control.suspect(peer, control_links, -1, seen, needed);
          },
          nb::arg("peer"), nb::arg("seen"), nb::arg("needed"))
      .def(
          "begin_call",
          [](Control& control, std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
             std::shared_ptr<Description> description) {
            return control.recorder().begin(communicator, sequence, digest, std::move(description), call_site());
          },
          nb::arg("communicator"), nb::arg("sequence"), nb::arg("digest"), nb::arg("description"))
      .def(
          "end_call",
          [](Control& control, std::size_t index, bool done) {
            control.recorder().end(index, done ? RecordState::done : RecordState::failed);
          },
          nb::arg("index"), nb::arg("done"))
      .def(
          "name_communicator",
          [](Control& control, std::uint64_t communicator, const std::vector<std::int32_t>& members) {
            control.recorder().name(communicator, " in " + ranks_text(members));
          },
          nb::arg("communicator"), nb::arg("members"))
      .def(
          "close_communicator",
          [](Control& control, std::uint64_t communicator) { control.recorder().close(communicator); },
          nb::arg("communicator"))
      .def("judges", &Control::judges)
      .def("measure_clock", measure_clock, nb::arg("limit_s"))
      .def("add_doorbell", &Control::add_doorbell, nb::arg("doorbell"))
      .def("remove_doorbell", &Control::remove_doorbell, nb::arg("doorbell"))
      .def("departed", &Control::departed, nb::arg("peer"))
      .def("farewell", &Control::farewell, nb::arg("peer"))
      .def("frames_sent", &Control::frames_sent)
      .def("leave", &Control::leave, nb::arg("farewell"), nb::call_guard<LockReleased>())
      .def("abandon", &Control::abandon);
}

std::span<const std::byte> bytes_of(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

void add_tagged(Endpoint& endpoint, std::int64_t lane, int peer, std::shared_ptr<Messenger> messenger,
                const nb::bytes& address, std::uint64_t out_tag, std::uint64_t in_tag, int socket) {
  Descriptor witness(socket);
  const TaggedChannel::Route route{messenger->connect(bytes_of(address)), out_tag, in_tag};
  endpoint.add_channel(
      lane, std::make_unique<TaggedChannel>(endpoint.member(peer), std::move(messenger), route, std::move(witness)));
}

void bind_messengers(nb::module_& module) {
  nb::class_<Messenger>(module, "Messenger")
      .def("address",
           [](Messenger& messenger) {
             const std::vector<std::byte> address = messenger.address();
             return nb::bytes(address.data(), address.size());
           })
      .def("reserve", &Messenger::reserve)
      .def(
          "reach", [](Messenger& messenger, const nb::bytes& address) { messenger.connect(bytes_of(address)); },
          nb::arg("address"))
      .def(
          "supports", [](const Messenger& messenger, int memory) { return messenger.supports(memory_type(memory)); },
          nb::arg("memory"));
  nb::class_<UcxMessenger, Messenger>(module, "UcxMessenger")
      // `owner` keeps the worker alive. It is never released: UCX may not be called in a forked child or when the
      // interpreter ends.
      .def(
          "__init__",
          [](UcxMessenger* place, const std::string& library, std::uintptr_t context, std::uintptr_t worker,
             const nb::object& owner) {
            new (place) UcxMessenger(library, context, worker);
            owner.inc_ref();
          },
          nb::arg("library"), nb::arg("context"), nb::arg("worker"), nb::arg("owner"))
      .def("version", &UcxMessenger::version)
      .def(
          "carriers",
          [](UcxMessenger& messenger, const nb::bytes& address) {
            return messenger.carriers(messenger.connect(bytes_of(address)));
          },
          nb::arg("address"));
  module.def(
      "mpi_messenger",
      [](const std::string& library, std::uintptr_t communicator, std::uintptr_t byte, bool pointers,
         std::uint64_t most_tag) -> std::shared_ptr<Messenger> {
        return make_mpi_messenger(library, {communicator, byte, pointers, most_tag});
      },
      nb::arg("library"), nb::arg("communicator"), nb::arg("byte"), nb::arg("pointers"), nb::arg("most_tag"));
}

void bind_endpoint(nb::module_& module) {
  nb::class_<Endpoint>(module, "Endpoint")
      .def(nb::init<std::shared_ptr<Control>, std::uint64_t, bool, std::vector<std::int32_t>>(), nb::arg("control"),
           nb::arg("communicator"), nb::arg("crowded"), nb::arg("members") = std::vector<std::int32_t>())
      .def(
          "add_shm",
          [](Endpoint& endpoint, std::int64_t lane, int peer, bool dialler, int memory, int bell, int peer_bell,
             int socket) {
            endpoint.add_channel(lane, std::make_unique<ShmChannel>(endpoint.member(peer), endpoint.size() - 1, dialler,
                                                                    Descriptor(memory), Descriptor(bell),
                                                                    Descriptor(peer_bell), Descriptor(socket)));
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("dialler"), nb::arg("memory"), nb::arg("bell"),
          nb::arg("peer_bell"), nb::arg("socket"))
      .def(
          "add_tcp",
          [](Endpoint& endpoint, std::int64_t lane, int peer, const std::vector<Connection*>& connections,
             std::uint32_t epoch, bool checksum) {
            std::vector<Connection> streams;
            for (Connection* connection : connections) streams.push_back(std::move(*connection));
            endpoint.add_channel(lane, std::make_unique<TcpChannel>(endpoint.member(peer), std::move(streams),
                                                                    TcpTerms{epoch, checksum}));
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("connections"), nb::arg("epoch"), nb::arg("checksum"))
      .def(
          "retire_stream",
          [](Endpoint& endpoint, std::int64_t lane, int peer, std::uint32_t stream, std::uint32_t resumptions) {
            return to_pair(endpoint.retire_stream(lane, endpoint.member(peer), {stream, resumptions}));
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("stream"), nb::arg("resumptions"), nb::call_guard<LockReleased>())
      .def(
          "resume_stream",
          [](Endpoint& endpoint, std::int64_t lane, int peer, std::uint32_t stream, Connection& connection,
             std::uint32_t resumptions, std::uint64_t received) {
            return endpoint.resume_stream(lane, endpoint.member(peer), stream, std::move(connection),
                                          {resumptions, received});
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("stream"), nb::arg("connection"), nb::arg("resumptions"),
          nb::arg("received"), nb::call_guard<LockReleased>())
      .def("add_tagged", add_tagged, nb::arg("lane"), nb::arg("peer"), nb::arg("messenger"), nb::arg("address"),
           nb::arg("out_tag"), nb::arg("in_tag"), nb::arg("socket"))
      .def("start", start, nb::arg("call"), nb::arg("inputs"), nb::arg("outputs"))
      .def("run", run, nb::arg("call"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("timeout_s"))
      .def("send", send, nb::arg("peer"), nb::arg("dtype"), nb::arg("tag"), nb::arg("array"), nb::arg("memory") = 0,
           nb::arg("shape") = std::vector<std::int64_t>(), nb::arg("synchronous") = false)
      .def("receive", receive, nb::arg("peer").none(), nb::arg("dtype"), nb::arg("tag").none(), nb::arg("array"),
           nb::arg("memory") = 0, nb::arg("shape") = std::vector<std::int64_t>(), nb::arg("up_to") = false)
      .def(
          "takes",
          [](Endpoint& endpoint, std::int64_t lane, int peer, int memory, std::uint64_t nbytes) {
            return endpoint.accepts(lane, peer, memory_type(memory), nbytes);
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("memory"), nb::arg("nbytes"))
      .def("takes_from_itself", &Endpoint::takes_from_itself, nb::arg("tag"), nb::arg("nbytes"),
           nb::call_guard<LockReleased>())
      .def("probe", probe, nb::arg("peer").none(), nb::arg("tag").none(), nb::arg("once"), nb::arg("takes") = false)
      .def("traffic", traffic)
      .def(
          "wait_for_end",
          [](Endpoint& endpoint, std::uint64_t seen, double most_s) {
            return endpoint.wait_for_end(seen, std::chrono::milliseconds(static_cast<std::int64_t>(most_s * 1e3)));
          },
          nb::arg("seen"), nb::arg("most_s"), nb::call_guard<LockReleased>())
      .def(
          "settle",
          [](Endpoint& endpoint, double limit_s) {
            {
              const LockReleased unlocked;
              endpoint.settle(std::chrono::milliseconds(static_cast<std::int64_t>(limit_s * 1e3)), interrupted);
            }
            if (PyErr_Occurred() != nullptr) throw nb::python_error();
          },
          nb::arg("limit_s"))
      .def("last_call", [](Endpoint& endpoint) { return endpoint.last_call(); })
      .def("close", &Endpoint::close, nb::call_guard<LockReleased>());
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "The native core of Unisono.";
  // A traceback that is alive at the interpreter's end keeps the objects of its frames. That is no defect, so nanobind
  // should not warn.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(raise_system_error);
  nb::list dtypes;
  for (const DTypeInfo& info : dtype_table) dtypes.append(nb::make_tuple(std::string(info.name), info.itemsize));
  module.attr("DTYPES") = dtypes;
  module.def(
      "name_dtype",
      [](std::uint32_t number, const std::string& name, std::size_t itemsize) {
        name_type(element_type(number), name, itemsize);
      },
      nb::arg("number"), nb::arg("name"), nb::arg("itemsize"));
  module.def(
      "reserve_pages",
      [](int memory, std::size_t nbytes) {
        if (!reserve_pages(memory, nbytes)) throw std::system_error(errno, std::generic_category(), "fallocate");
      },
      nb::arg("memory"), nb::arg("nbytes"));
  module.attr("SHM_NBYTES") = ShmChannel::segment_nbytes();
  module.attr("SENDING_LANE") = ChannelTable::sending_lane;
  module.attr("CONTROL_LINKS") = control_links;
  module.attr("RECEIVING_LANE") = ChannelTable::receiving_lane;

  nb::class_<Plan>(module, "Plan").def(nb::new_(&make_plan), nb::arg("words"));
  nb::class_<CompiledCall>(module, "Call")
      .def(nb::new_(&make_call), nb::arg("plan"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("counts"),
           nb::arg("segments"), nb::arg("digest"), nb::arg("description"), nb::arg("facts") = "{}",
           nb::arg("shared") = std::pair(false, false))
      .def("usage", [](const CompiledCall& call) {
        const Usage& usage = *call.usage;
        return nb::make_tuple(usage.calls.load(), usage.timed.load(), usage.nanoseconds.load());
      });
  bind_arena(module);
  bind_float_environment(module);
  bind_tls(module);
  bind_control(module);
  bind_messengers(module);
  bind_started_call(module);
  bind_endpoint(module);
  bind_call_cache(module);
  bind_fast_messages(module);
  bind_cached_method(module);
  bind_cuda_programs(module);
  bind_strided_copies(module);
  bind_torch_tensors(module);
  bind_group_recorder(module);
  bind_windows(module);
  bind_xla_calls(module);

  module.def("reduce", reduce, nb::arg("dst"), nb::arg("sources"), nb::arg("dtype"), nb::arg("combine"),
             nb::arg("divisor"));
  module.def("crc32c", checksum, nb::arg("x"), nb::arg("before"));
  module.def("wire_nbytes", wire_nbytes, nb::arg("form"), nb::arg("elements"));
  module.def("to_wire", to_wire, nb::arg("form"), nb::arg("wire"), nb::arg("x"), nb::arg("residual"));
  module.def("from_wire", from_wire, nb::arg("form"), nb::arg("x"), nb::arg("wire"), nb::arg("adds"));
  module.def("simd", simd_level);
  module.def("flag_latency_ns", flag_latency_ns, nb::arg("core_a"), nb::arg("core_b"), nb::arg("rounds"),
             nb::call_guard<LockReleased>());
  module.def("notify_of_signal", notify_of_signal, nb::arg("event"));
  module.def("forget_signal", forget_signal, nb::arg("event"));
  module.def("set_package_directory", set_package_directory, nb::arg("directory"));
}
