// The parts, locks and servers of windows, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "python_call.h"
#include "windows/window_server.h"

namespace nb = nanobind;

namespace unisono {
namespace {

// Operations on larger operands release the interpreter's lock.
constexpr std::size_t most_nbytes_held = 64 << 10;
// Accumulates of more elements do so too. Those of fewer pass the gate once, so they can be tried again.
constexpr std::int64_t most_elements_held = 64;

DType dtype_of(int number) {
  if (number < 0 || number >= static_cast<int>(dtype_count)) throw std::invalid_argument("unknown element type");
  return static_cast<DType>(number);
}

// A part with its lock, and the buffers that own their memory.
class HeldPart {
 public:
  HeldPart(nb::handle memory, nb::handle locks, std::size_t lock, nb::object control, double timeout_s)
      : memory_(memory, true),
        locks_(locks, true),
        control_(std::move(control)),
        patience_{control_.is_none() ? nullptr : &nb::cast<const Control&>(control_), timeout_s, interrupted},
        lock_(lock_in(locks_, lock)),
        part_(memory_.data(), memory_.nbytes(), lock_.gate()) {}

  const WindowPart& part() const { return part_; }
  WindowLock& lock() const { return lock_; }

  // Runs an operation, which passes the gate with the patience that it gets. It keeps the interpreter's lock if it is
  // small and need not wait.
  template <class Operation>
  int run(bool is_small, Operation operation) const {
    LockOutcome outcome = is_small ? operation(Patience{nullptr, 0, nullptr}) : LockOutcome::late;
    if (outcome == LockOutcome::late) {
      const LockReleased unlocked;
      outcome = operation(patience_);
    }
    if (outcome == LockOutcome::interrupted) throw nb::python_error();
    return static_cast<int>(outcome);
  }

 private:
  static WindowLock& lock_in(const Buffer& locks, std::size_t index) {
    if ((index + 1) * sizeof(WindowLock) > locks.nbytes()) throw std::invalid_argument("there is no such lock");
    auto* lock = reinterpret_cast<WindowLock*>(locks.data()) + index;
    if (reinterpret_cast<std::uintptr_t>(lock) % alignof(WindowLock) != 0)
      throw std::invalid_argument("locks must begin at a multiple of 64 bytes");
    return *lock;
  }

  Buffer memory_;
  Buffer locks_;
  nb::object control_;
  Patience patience_;
  WindowLock& lock_;
  WindowPart part_;
};

// A selection with the buffer of its positions.
class HeldSelection {
 public:
  HeldSelection(std::int64_t start, std::int64_t count, std::int64_t step, nb::handle indices) {
    selection = {start, count, step};
    if (indices.is_none()) return;
    held_.emplace(indices, false);
    selection.indices =
        std::span(reinterpret_cast<const std::int64_t*>(held_->data()), held_->nbytes() / sizeof(std::int64_t));
    selection.count = static_cast<std::int64_t>(selection.indices.size());
  }

  Selection selection;

 private:
  std::optional<Buffer> held_;
};

std::size_t nbytes_of(DType dtype, const Selection& selection) {
  return static_cast<std::size_t>(std::max<std::int64_t>(selection.count, 0)) *
         dtype_table[static_cast<std::size_t>(dtype)].itemsize;
}

void check_room(const Buffer& array, std::size_t nbytes) {
  if (array.nbytes() < nbytes) throw std::invalid_argument("the array is shorter than the selection");
}

template <class Function>
void run_unlocked_if_large(std::size_t nbytes, Function run) {
  if (nbytes <= most_nbytes_held) {
    run();
    return;
  }
  const LockReleased unlocked;
  run();
}

void put(const HeldPart& held, int dtype, std::int64_t start, std::int64_t count, std::int64_t step, nb::handle indices,
         nb::handle source) {
  const HeldSelection elements(start, count, step, indices);
  const Buffer from(source, false);
  const std::size_t nbytes = nbytes_of(dtype_of(dtype), elements.selection);
  check_room(from, nbytes);
  run_unlocked_if_large(nbytes, [&] { held.part().put(dtype_of(dtype), elements.selection, from.data()); });
}

void get(const HeldPart& held, int dtype, std::int64_t start, std::int64_t count, std::int64_t step, nb::handle indices,
         nb::handle target) {
  const HeldSelection elements(start, count, step, indices);
  const Buffer to(target, true);
  const std::size_t nbytes = nbytes_of(dtype_of(dtype), elements.selection);
  check_room(to, nbytes);
  run_unlocked_if_large(nbytes, [&] { held.part().get(dtype_of(dtype), elements.selection, to.data()); });
}

int accumulate(const HeldPart& held, int dtype, int op, std::int64_t start, std::int64_t count, std::int64_t step,
               nb::handle indices, nb::handle operand, nb::handle result) {
  const HeldSelection elements(start, count, step, indices);
  const Buffer from(operand, false);
  const Buffer to = result.is_none() ? Buffer() : Buffer(result, true);
  const std::size_t nbytes = nbytes_of(dtype_of(dtype), elements.selection);
  check_room(from, nbytes);
  if (!result.is_none()) check_room(to, nbytes);
  return held.run(elements.selection.count <= most_elements_held, [&](const Patience& patience) {
    return held.part().accumulate(dtype_of(dtype), static_cast<std::uint8_t>(op), elements.selection, from.data(),
                                  result.is_none() ? nullptr : to.data(), patience);
  });
}

int compare_and_swap(const HeldPart& held, int dtype, std::int64_t position, nb::handle compared, nb::handle value) {
  const Buffer expected(compared, false);
  const Buffer to(value, true);
  const std::size_t nbytes = nbytes_of(dtype_of(dtype), {position, 1});
  check_room(expected, nbytes);
  check_room(to, nbytes);
  return held.run(true, [&](const Patience& patience) {
    return held.part().compare_and_swap(dtype_of(dtype), position, expected.data(), to.data(), to.data(), patience);
  });
}

int lock(const HeldPart& held, bool exclusive, std::int32_t rank, double timeout_s, const Control& control) {
  if (held.lock().try_lock(exclusive, rank)) return static_cast<int>(LockOutcome::locked);
  LockOutcome outcome;
  {
    const LockReleased unlocked;
    outcome = held.lock().lock(exclusive, rank, timeout_s, control, interrupted);
  }
  if (outcome == LockOutcome::interrupted) throw nb::python_error();
  return static_cast<int>(outcome);
}

// A server, with the endpoint and the part that it uses.
class HeldServer {
 public:
  HeldServer(nb::object endpoint, nb::object part, nb::object open_channel)
      : endpoint_(std::move(endpoint)), part_(std::move(part)), open_channel_(std::move(open_channel)) {
    const auto& held = nb::cast<const HeldPart&>(part_);
    server_.emplace(nb::cast<Endpoint&>(endpoint_), held.part(), held.lock(), [this](std::int32_t peer) {
      const LockTaken locked;
      try {
        open_channel_(peer);
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("the server of a window");
      }
    });
  }

  // The endpoint is closed, if it is open still, because the thread ends only then.
  ~HeldServer() {
    if (!server_) return;
    auto& endpoint = nb::cast<Endpoint&>(endpoint_);
    const LockReleased unlocked;
    if (!endpoint.abandoned()) endpoint.close();
    server_.reset();
  }
  HeldServer(const HeldServer&) = delete;
  HeldServer& operator=(const HeldServer&) = delete;

  void join() {
    const LockReleased unlocked;
    server_->join();
  }

 private:
  nb::object endpoint_;
  nb::object part_;
  nb::object open_channel_;
  std::optional<WindowServer> server_;
};

}  // namespace

void bind_windows(nb::module_& module) {
  module.def("fence_memory", [] { std::atomic_thread_fence(std::memory_order_seq_cst); });
  module.attr("WINDOW_LOCK_NBYTES") = sizeof(WindowLock);
  module.attr("WINDOW_REQUEST_TAG") = WindowServer::request_tag;
  module.attr("WINDOW_REPLY_TAG") = WindowServer::reply_tag;
  module.attr("WINDOW_GRANT_TAG") = WindowServer::grant_tag;
  nb::class_<HeldPart>(module, "WindowPart")
      .def(nb::init<nb::handle, nb::handle, std::size_t, nb::object, double>(), nb::arg("memory"), nb::arg("locks"),
           nb::arg("lock"), nb::arg("control").none(), nb::arg("timeout_s"))
      .def_static(
          "can_accumulate",
          [](int dtype, int op) { return WindowPart::can_accumulate(dtype_of(dtype), static_cast<std::uint8_t>(op)); },
          nb::arg("dtype"), nb::arg("op"))
      .def("put", put, nb::arg("dtype"), nb::arg("start"), nb::arg("count"), nb::arg("step"), nb::arg("indices").none(),
           nb::arg("source"))
      .def("get", get, nb::arg("dtype"), nb::arg("start"), nb::arg("count"), nb::arg("step"), nb::arg("indices").none(),
           nb::arg("target"))
      .def("accumulate", accumulate, nb::arg("dtype"), nb::arg("op"), nb::arg("start"), nb::arg("count"),
           nb::arg("step"), nb::arg("indices").none(), nb::arg("operand"), nb::arg("result").none())
      .def("compare_and_swap", compare_and_swap, nb::arg("dtype"), nb::arg("position"), nb::arg("compared"),
           nb::arg("value"))
      .def("lock", lock, nb::arg("exclusive"), nb::arg("rank"), nb::arg("timeout_s"), nb::arg("control"))
      .def(
          "unlock", [](const HeldPart& held, bool exclusive) { held.lock().unlock(exclusive); }, nb::arg("exclusive"))
      .def("holder", [](const HeldPart& held) { return held.lock().holder(); });
  nb::class_<HeldServer>(module, "WindowServer")
      .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("endpoint"), nb::arg("part"),
           nb::arg("open_channel"))
      .def("join", &HeldServer::join);
}

}  // namespace unisono
