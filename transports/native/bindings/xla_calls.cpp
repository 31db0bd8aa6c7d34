// Theory of operation
// -------------------
// While JAX lowers a program, Python plans and compiles each call of Unisono in it, and registers it here. The program
// contains a custom call of XLA with three attributes: the number of the registered call, a random number of this
// process, and whether XLA keeps the calls in order. The random number keeps a program that another process has
// compiled and stored from running here.
//
// When XLA reaches the custom call, it calls `handle`, on a thread of its own and without the interpreter's lock. The
// handler finds the registered call and runs it on XLA's buffers. The first argument is the input and the first result
// the output. All others are tokens, which only keep calls in order.
//
// A short call takes some 0.1 µs. So the handler finds it without a lock and without a look-up in a table: the number
// of a call is the address of its entry. The entries are never freed, because a program may run a call after its
// removal. The calls in them are freed.
//
// The handler uses the C interface of XLA's FFI, which is stable, so no part of jaxlib is needed to build or link it.
#include "xla_calls.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <xla/ffi/api/c_api.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "keyboard_interrupt.h"
#include "python_call.h"
#include "system/removable.h"

namespace nb = nanobind;

namespace unisono {
namespace {

// The Python classes of failures, by `FailureKind`. Without a failure, the communicator has been closed.
constexpr std::array class_names{"UsageError",
                                 "MismatchError",
                                 "PeerLostError",
                                 "CollectiveTimeoutError",
                                 "AbortedError",
                                 "InternalError",
                                 "TransportUnavailableError",
                                 "CorruptionError"};
// A call counts as waiting after it has looked for progress this many times.
constexpr std::uint32_t polls_at_once = 200;

// The arrays that XLA passes to a call; nullptr for one that it does not pass.
struct Arrays {
  std::byte* input;
  std::byte* output;
};

// One registered call. It is made and destroyed with the interpreter's lock held, and runs without it.
class RegisteredCall {
 public:
  RegisteredCall(nb::object endpoint, std::string description, double timeout_s)
      : owner_(std::move(endpoint)),
        endpoint_(nb::cast<Endpoint&>(owner_)),
        description_(std::move(description)),
        site_(call_site()),
        timeout_s_(timeout_s) {}
  virtual ~RegisteredCall() = default;

  // Runs the call to its end.
  virtual Outcome run(const Arrays& arrays) const = 0;
  Endpoint& endpoint() const { return endpoint_; }
  const std::string& description() const { return description_; }

 protected:
  Outcome wait(Request& request) const { return endpoint_.wait(request, timeout_s_, keyboard_interrupted); }
  const CallSite& site() const { return site_; }

 private:
  nb::object owner_;
  Endpoint& endpoint_;
  std::string description_;
  CallSite site_;
  double timeout_s_;
};

// A collective. `zeros`: the bytes of the output that are zero unless the plan writes them.
class RegisteredCollective final : public RegisteredCall {
 public:
  RegisteredCollective(nb::object endpoint, nb::object call, double timeout_s, std::size_t zeros)
      : RegisteredCall(std::move(endpoint), nb::cast<const CompiledCall&>(call).description->text, timeout_s),
        owner_(std::move(call)),
        call_(nb::cast<const CompiledCall&>(owner_)),
        zeros_(zeros) {}

  Outcome run(const Arrays& arrays) const override {
    if (zeros_ != 0) std::memset(arrays.output, 0, zeros_);
    std::byte token{};  // the input of a barrier
    std::byte* input = arrays.input == nullptr ? &token : arrays.input;
    const Memory memory{{&input, 1}, {&arrays.output, 1}};
    std::unique_ptr<Request> request;
    if (!endpoint().try_now(call_, memory, site(), polls_at_once, request))
      request = endpoint().start(call_, memory, site());
    return request ? wait(*request) : Outcome::done;
  }

 private:
  nb::object owner_;
  const CompiledCall& call_;
  std::size_t zeros_;
};

// One side of an exchange: the peer, the number of the element type, and the bytes.
using Side = std::tuple<std::int32_t, int, std::size_t>;

// A message to one rank, a message from one rank, or both at once. Without a message from a rank, the output is zero.
class RegisteredExchange final : public RegisteredCall {
 public:
  RegisteredExchange(nb::object endpoint, std::string description, std::optional<Side> send,
                     std::optional<Side> receive, std::uint32_t tag, std::size_t zeros, double timeout_s)
      : RegisteredCall(std::move(endpoint), std::move(description), timeout_s),
        send_(send),
        receive_(receive),
        tag_(tag),
        zeros_(zeros) {}

  Outcome run(const Arrays& arrays) const override {
    if (zeros_ != 0) std::memset(arrays.output, 0, zeros_);
    std::unique_ptr<Request> received;
    std::unique_ptr<Request> sent;
    if (receive_) {
      const auto [peer, dtype, nbytes] = *receive_;
      received =
          endpoint().start(Message::to_receive(peer, static_cast<DType>(dtype), tag_, arrays.output, nbytes), site());
    }
    if (send_) {
      const auto [peer, dtype, nbytes] = *send_;
      sent = endpoint().start(Message::to_send(peer, static_cast<DType>(dtype), tag_, arrays.input, nbytes), site());
    }
    Outcome outcome = Outcome::done;
    if (received) outcome = wait(*received);
    if (sent && outcome == Outcome::done) outcome = wait(*sent);
    return outcome;
  }

 private:
  std::optional<Side> send_;
  std::optional<Side> receive_;
  std::uint32_t tag_;
  std::size_t zeros_;
};

// Destroys a call with the interpreter's lock, because the last user may be a thread of XLA, which does not hold it.
struct DestroyedWithLock {
  void operator()(const RegisteredCall* call) const {
    if (interpreter_ends()) return;  // the process ends, and its memory with it
    const LockTaken lock;
    delete call;
  }
};
using Entry = Removable<const RegisteredCall, DestroyedWithLock>;

Entry& entry_of(std::int64_t number) { return *reinterpret_cast<Entry*>(number); }

// The entries of this process, and the `Control`s with which a call of a program has failed. Python's threads register
// calls, and threads of XLA note failures.
class Table {
 public:
  // Returns the number of the call.
  std::int64_t add(std::unique_ptr<RegisteredCall> call) {
    const std::lock_guard lock(mutex_);
    return reinterpret_cast<std::int64_t>(
        &entries_.emplace_back(std::unique_ptr<const RegisteredCall, DestroyedWithLock>(call.release())));
  }

  std::int64_t process() const { return process_; }

  // Remembers that a program has got the failure of a job, and returns whether it has.
  void note_failure(const Control& control) {
    const std::lock_guard lock(mutex_);
    failed_.insert(&control);
  }
  bool has_failed(const Control& control) const {
    const std::lock_guard lock(mutex_);
    return failed_.contains(&control);
  }

 private:
  static std::int64_t random_number() {
    std::random_device random;
    return std::uniform_int_distribution<std::int64_t>(1, std::numeric_limits<std::int64_t>::max())(random);
  }

  mutable std::mutex mutex_;   // guards the next two
  std::deque<Entry> entries_;  // a deque, because their addresses are the numbers of the calls
  std::unordered_set<const Control*> failed_;
  const std::int64_t process_ = random_number();
};

// Never destroyed, because threads of XLA may outlive the interpreter.
Table& table() {
  static auto& only = *new Table;
  return only;
}

XLA_FFI_Error* error_of(const XLA_FFI_Api* api, const std::string& text,
                        XLA_FFI_Error_Code code = XLA_FFI_Error_Code_INTERNAL) {
  XLA_FFI_Error_Create_Args arguments{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(), code};
  return api->XLA_FFI_Error_Create(&arguments);
}

std::string failure_text(const RegisteredCall& call) {
  const Failure failure = call.endpoint().control().failure();
  const char* const name = class_names.at(static_cast<std::size_t>(failure.kind));
  const std::string text = failure.kind == FailureKind::none ? "this communicator is closed" : failure.text;
  return std::string(name) + ": " + text + "; in " + call.description();
}

// JAX may have run Python's signal handler while the main thread waited, and then raises only the error of the program.
// So the signal is repeated, and the main thread raises KeyboardInterrupt after that error.
std::string interrupted_text(const RegisteredCall& call) {
  PyErr_SetInterrupt();
  return "KeyboardInterrupt: Ctrl-C has ended " + call.description();
}

// Ctrl-C between two calls would otherwise be seen only when the whole program has ended.
Outcome run(const RegisteredCall& call, const Arrays& arrays) {
  if (!keyboard_interrupted()) return call.run(arrays);
  Control& control = call.endpoint().control();
  control.fail({FailureKind::aborted, control.rank(), control.rank(), -1,
                "rank " + std::to_string(control.rank()) + " was interrupted"});
  return Outcome::interrupted;
}

// Runs a call, and returns the text of its error; empty if there is none.
std::string run_or_text(const RegisteredCall& call, const Arrays& arrays) {
  if (call.endpoint().abandoned()) return "UsageError: this process was forked from a rank; in " + call.description();
  try {
    const Outcome outcome = run(call, arrays);
    if (outcome == Outcome::done) return {};
    table().note_failure(call.endpoint().control());
    return outcome == Outcome::interrupted ? interrupted_text(call) : failure_text(call);
  } catch (const std::exception& error) {
    return std::string("InternalError: ") + error.what() + "; in " + call.description();
  }
}

// Runs the call of a number, and returns the text of its error; empty if there is none.
std::string run_or_text(std::int64_t number, const Arrays& arrays) {
  const Entry::Use call(entry_of(number));
  if (call) return run_or_text(*call, arrays);
  return "UsageError: the communicator that this program was traced with is closed: trace it again with another comm";
}

// Runs the registered call `number` for mpi_for_xla.cpp, and returns whether it has succeeded. Otherwise `text` gets
// the error, as a string of less than `text_nbytes`.
extern "C" bool run_registered(std::int64_t number, void* input, void* output, char* text, std::size_t text_nbytes) {
  const std::string error = run_or_text(number, {static_cast<std::byte*>(input), static_cast<std::byte*>(output)});
  text[error.copy(text, text_nbytes - 1)] = 0;
  return error.empty();
}

// The places of the attributes of a custom call: XLA sorts attributes by name.
constexpr std::int64_t call_place = 0, ordered_place = 1, process_place = 2, places = 3;

// Returns the integer at a place, or 0 if there is none. No process has the number 0.
std::int64_t attribute(const XLA_FFI_Attrs& attributes, std::int64_t place) {
  if (attributes.size != places || attributes.types[place] != XLA_FFI_AttrType_SCALAR) return 0;
  const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(attributes.attrs[place]);
  return scalar.dtype == XLA_FFI_DataType_S64 ? *static_cast<const std::int64_t*>(scalar.value) : 0;
}

std::byte* memory_of(void* buffer) {
  const auto& array = *static_cast<const XLA_FFI_Buffer*>(buffer);
  return array.dtype == XLA_FFI_DataType_TOKEN ? nullptr : static_cast<std::byte*>(array.data);
}

// A token that is passed as data is a number without a meaning, and XLA's memory for it has any value.
void set_token(const XLA_FFI_Rets& results) {
  if (results.size == 0) return;
  const auto& last = *static_cast<const XLA_FFI_Buffer*>(results.rets[results.size - 1]);
  if (last.dtype == XLA_FFI_DataType_U32 && last.rank == 0) std::memset(last.data, 0, sizeof(std::uint32_t));
}

// The version of the interface that the handler claims to use. Older versions of XLA accept only their own. The handler
// uses only parts that all versions have, so it claims that of the jaxlib that is loaded.
std::atomic<int> claimed_minor_version{XLA_FFI_API_MINOR};

// XLA asks for the version when a handler is registered.
bool answer_query(const XLA_FFI_CallFrame& frame) {
  for (XLA_FFI_Extension_Base* each = frame.extension_start; each != nullptr; each = each->next) {
    if (each->type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(each)->metadata;
    metadata.api_version.major_version = XLA_FFI_API_MAJOR;
    metadata.api_version.minor_version = claimed_minor_version;
    metadata.traits = 0;
    return true;
  }
  return false;
}

extern "C" XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  if (answer_query(*frame) || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  if (attribute(frame->attrs, process_place) != table().process())
    return error_of(frame->api, "UsageError: another process has compiled this program: compile it in this one");
  if (attribute(frame->attrs, ordered_place) == 0) set_token(frame->rets);
  const std::string text = run_or_text(attribute(frame->attrs, call_place),
                                       {frame->args.size == 0 ? nullptr : memory_of(frame->args.args[0]),
                                        frame->rets.size == 0 ? nullptr : memory_of(frame->rets.rets[0])});
  return text.empty() ? nullptr : error_of(frame->api, text);
}

nb::capsule handler(int minor_version) {
  claimed_minor_version = minor_version;
  return nb::capsule(reinterpret_cast<void*>(handle));
}

std::int64_t register_collective(nb::object endpoint, nb::object call, double timeout_s, std::size_t zeros) {
  watch_keyboard();
  return table().add(std::make_unique<RegisteredCollective>(std::move(endpoint), std::move(call), timeout_s, zeros));
}

std::int64_t register_exchange(nb::object endpoint, std::string description, std::optional<Side> send,
                               std::optional<Side> receive, std::uint32_t tag, std::size_t zeros, double timeout_s) {
  watch_keyboard();
  return table().add(std::make_unique<RegisteredExchange>(std::move(endpoint), std::move(description), send, receive,
                                                          tag, zeros, timeout_s));
}

}  // namespace

void bind_xla_calls(nb::module_& module) {
  module.def("xla_handler", handler, nb::arg("minor_version"));
  module.def("xla_runner", [] { return reinterpret_cast<std::uintptr_t>(run_registered); });
  module.def("xla_has_failed", [](const Control& control) { return table().has_failed(control); }, nb::arg("control"));
  module.def("xla_process", [] { return table().process(); });
  module.def("register_for_xla", register_collective, nb::arg("endpoint"), nb::arg("call"), nb::arg("timeout_s"),
             nb::arg("zeros"));
  module.def("register_exchange_for_xla", register_exchange, nb::arg("endpoint"), nb::arg("description"),
             nb::arg("send").none(), nb::arg("receive").none(), nb::arg("tag"), nb::arg("zeros"), nb::arg("timeout_s"));
  module.def("forget_for_xla", [](std::int64_t number) { entry_of(number).remove(); }, nb::arg("number"));
}

}  // namespace unisono
