// `MessageCalls`: sends and receives of numpy arrays with no Python between the user's call and the core.
//
// Anything unusual is a miss, which Python handles: an array of another class, one that is not in C order or cannot be
// written, a rank or tag that is no int or out of range, or a peer without an open channel. A miss is no error. If the
// caller waits for the message, it is first tried for a moment with the interpreter's lock held, as small collectives
// are (run_call). Arrays are read through numpy's public structure, because the buffer protocol would cost as much as
// the message.
#define NPY_NO_DEPRECATED_API NPY_1_20_API_VERSION
#include <nanobind/stl/string.h>
#include <numpy/ndarraytypes.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "endpoint/message_shape.h"
#include "kernels/dtype.h"
#include "started_call.h"

namespace nb = nanobind;

namespace unisono {
namespace {

using Seconds = std::chrono::duration<double>;

// The memory of an array in C order.
struct Elements {
  DType dtype;
  std::byte* data;
  std::size_t nbytes;
  std::uint64_t shape = 0;  // its shape_code

  bool overlap(const Elements& other) const { return data < other.data + other.nbytes && other.data < data + nbytes; }
};

class MessageCalls {
 public:
  // `code_of(dtype)` returns the number of a numpy dtype in the core, or None; it is called once for each dtype that
  // has one. `any_source` and `any_tag` are the objects that stand for any rank and any tag. `on_failure(outcome,
  // call)` raises. `on_send` and `on_receive` turn a StartedCall and the text of its call into the result of
  // `start_send` and `start_receive`.
  MessageCalls(nb::object endpoint, nb::object array_type, nb::object code_of, nb::object any_source,
               nb::object any_tag, nb::object on_failure, nb::object on_send, nb::object on_receive, double timeout_s)
      : endpoint_(std::move(endpoint)),
        target_(&nb::cast<Endpoint&>(endpoint_)),
        array_type_(std::move(array_type)),
        code_of_(std::move(code_of)),
        any_source_(std::move(any_source)),
        any_tag_(std::move(any_tag)),
        on_failure_(std::move(on_failure)),
        on_send_(std::move(on_send)),
        on_receive_(std::move(on_receive)),
        timeout_s_(timeout_s),
        me_(target_->member(target_->rank())) {}

  // Each of these functions runs the call and returns true, or does nothing and returns false.

  bool send(nb::handle x, nb::handle dest, nb::handle tag, nb::handle timeout_s) {
    const auto message = sent(x, dest, tag);
    const auto limit_s = limit_of(timeout_s);
    if (!message || !limit_s) return false;
    complete(*begun(*message, true), *message, x, *limit_s);
    return true;
  }

  bool receive(nb::handle out, nb::handle source, nb::handle tag, nb::handle timeout_s) {
    const auto message = received(out, source, tag);
    const auto limit_s = limit_of(timeout_s);
    if (!message || !limit_s) return false;
    complete(*begun(*message, true), *message, out, *limit_s);
    return true;
  }

  // Sends and receives at once, within one time limit.
  bool exchange(nb::handle x, nb::handle dest, nb::handle out, nb::handle source, nb::handle tag,
                nb::handle timeout_s) {
    const auto outgoing = sent(x, dest, tag);
    const auto incoming = source.is(any_source_) || tag.is(any_tag_) ? std::nullopt : received(out, source, tag);
    const auto limit_s = limit_of(timeout_s);
    if (!outgoing || !incoming || !limit_s || elements_of(*outgoing).overlap(elements_of(*incoming))) return false;
    exchanged(*outgoing, x, *incoming, out, *limit_s);
    return true;
  }

  // Each of these three moves the elements of an array, whatever its shape, within the usual time limit. A receive "up
  // to" takes a message of at most the length of `out`, and returns its source, tag, element type and bytes. False and
  // None mean that nothing has been done.

  bool send_flat(nb::handle x, nb::handle dest, nb::handle tag) {
    auto message = sent(x, dest, tag);
    if (!message) return false;
    message->posting.buffer.header.digest = 0;  // of its shape
    complete(*begun(*message, true), *message, x, timeout_s_);
    return true;
  }

  nb::object receive_up_to(nb::handle out, nb::handle source, nb::handle tag) {
    const auto message = received_up_to(out, source, tag);
    if (!message) return nb::none();
    const auto request = begun(*message, true);
    complete(*request, *message, out, timeout_s_);
    return message_of(*request);
  }

  nb::object exchange_up_to(nb::handle x, nb::handle dest, nb::handle tag, nb::handle out, nb::handle source,
                            nb::handle tag_received) {
    auto outgoing = sent(x, dest, tag);
    const auto incoming = received_up_to(out, source, tag_received);
    if (!outgoing || !incoming || elements_of(*outgoing).overlap(elements_of(*incoming))) return nb::none();
    outgoing->posting.buffer.header.digest = 0;  // of its shape
    return message_of(*exchanged(*outgoing, x, *incoming, out, timeout_s_));
  }

  // Each of these three starts a message in the background and returns the result of `on_send` or `on_receive`, which
  // makes the Work. None means that it has done nothing, and the caller takes the slow path.

  nb::object start_send(nb::handle x, nb::handle dest, nb::handle tag, double limit_s) {
    return started(sent(x, dest, tag), x, limit_s);
  }

  nb::object start_receive(nb::handle out, nb::handle source, nb::handle tag, double limit_s) {
    return started(received(out, source, tag), out, limit_s);
  }

  nb::object start_receive_up_to(nb::handle out, nb::handle source, nb::handle tag, double limit_s) {
    return started(received_up_to(out, source, tag), out, limit_s);
  }

 private:
  struct Begun {
    std::unique_ptr<Request> request;
    bool has_site;
  };

  static bool is_short(const Message& message, bool is_waited_for) {
    return message.posting.buffer.header.nbytes <=
           (is_waited_for ? most_nbytes_with_lock_held : most_nbytes_begun_at_once);
  }

  Begun begin(const Message& message, bool is_waited_for) {
    const std::uint32_t rounds = is_waited_for ? polls_with_lock_held : 1;
    auto request = target_->try_now(message, {}, is_short(message, is_waited_for) ? rounds : 0);
    if (request) return {std::move(request), false};
    return {target_->start(message, call_site()), true};
  }

  // Finding the place of a call in the program takes as long as a short message, so it is done only if the call has not
  // ended.
  void record_site(Begun& begun) {
    if (!begun.has_site && begun.request->outcome() == Outcome::pending) target_->set_site(*begun.request, call_site());
    begun.has_site = true;
  }

  std::unique_ptr<Request> begun(const Message& message, bool is_waited_for) {
    Begun message_begun = begin(message, is_waited_for);
    if (is_waited_for) yield_and_poll(*target_, *message_begun.request);
    record_site(message_begun);
    return std::move(message_begun.request);
  }

  // Sends and receives at once, and returns the ended receive.
  std::unique_ptr<Request> exchanged(const Message& outgoing, nb::handle x, const Message& incoming, nb::handle out,
                                     double limit_s) {
    const auto began = std::chrono::steady_clock::now();
    Begun receiving = begin(incoming, false);
    Begun sending = begin(outgoing, false);
    if (is_short(incoming, true)) target_->poll_rounds(*receiving.request, polls_with_lock_held);
    yield_and_poll(*target_, *receiving.request);
    record_site(receiving);
    record_site(sending);
    complete(*sending.request, outgoing, x, limit_s);
    const double remaining_s = limit_s - Seconds(std::chrono::steady_clock::now() - began).count();
    complete(*receiving.request, incoming, out, std::max(0.0, remaining_s));
    return std::move(receiving.request);
  }

  // If the message fails and a library may still use the memory, the array is never freed.
  void complete(Request& request, const Message& message, nb::handle array, double limit_s) {
    Outcome outcome = request.outcome();
    if (outcome == Outcome::pending) {
      const LockReleased unlocked;
      outcome = target_->wait(request, limit_s, interrupted);
    }
    if (outcome != Outcome::done && target_->memory_must_leak()) array.inc_ref();
    const int code = outcome_of(outcome);
    if (outcome != Outcome::done) on_failure_(code, text_of(message));
  }

  nb::object started(const std::optional<Message>& message, nb::handle array, double limit_s) {
    if (!message) return nb::none();
    auto request = begun(*message, false);
    target_->run_in_background(*request, limit_s);
    const nb::object& finish = message->sends() ? on_send_ : on_receive_;
    return finish(StartedCall(endpoint_, {nb::borrow(array)}, std::move(request)), text_of(*message));
  }

  std::optional<Message> sent(nb::handle x, nb::handle dest, nb::handle tag) const {
    const auto from = elements_of(x, false);
    const auto peer = peer_of(dest);
    const auto number = tag_of(tag);
    if (!from || !peer || !number || target_->abandoned() || !target_->reaches(*peer)) return std::nullopt;
    return Message::to_send(*peer, from->dtype, *number, from->data, from->nbytes, MemoryType::host, from->shape);
  }

  std::optional<Message> received(nb::handle out, nb::handle source, nb::handle tag) const {
    const auto to = elements_of(out, true);
    const auto peer = peer_of(source);
    const auto number = tag_of(tag);
    const bool from_any = source.is(any_source_) && target_->size() > 1;
    const bool with_any = tag.is(any_tag_);
    if (!to || (!peer && !from_any) || (!number && !with_any) || target_->abandoned()) return std::nullopt;
    return Message::to_receive(peer, to->dtype, number, to->data, to->nbytes, MemoryType::host, to->shape);
  }

  std::optional<Message> received_up_to(nb::handle out, nb::handle source, nb::handle tag) const {
    auto message = received(out, source, tag);
    if (message) {
      message->posting.buffer.header.digest = 0;  // of its shape
      message->posting.up_to = true;
    }
    return message;
  }

  std::optional<Elements> elements_of(nb::handle object, bool written) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != array_type_.ptr()) return std::nullopt;
    auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
    const int flags = PyArray_FLAGS(array);
    if ((flags & NPY_ARRAY_C_CONTIGUOUS) == 0) return std::nullopt;
    if (written && (flags & NPY_ARRAY_WRITEABLE) == 0) return std::nullopt;
    const auto dtype = dtype_of(reinterpret_cast<PyObject*>(PyArray_DESCR(array)));
    if (!dtype) return std::nullopt;
    std::size_t nbytes = dtype_table[static_cast<std::size_t>(*dtype)].itemsize;
    const std::span<const npy_intp> shape(PyArray_DIMS(array), static_cast<std::size_t>(PyArray_NDIM(array)));
    for (const npy_intp length : shape) nbytes *= static_cast<std::size_t>(length);
    const std::uint64_t code = shape.size() < 2 ? 0 : shape_code(shape);
    return Elements{*dtype, static_cast<std::byte*>(PyArray_DATA(array)), nbytes, code};
  }

  std::optional<DType> dtype_of(nb::handle descr) const {
    const auto entry =
        std::find_if(dtypes_.begin(), dtypes_.end(), [&](const auto& each) { return each.first.is(descr); });
    if (entry != dtypes_.end()) return entry->second;
    const nb::object code = code_of_(descr);
    if (code.is_none()) return std::nullopt;
    return dtypes_.emplace_back(nb::borrow(descr), static_cast<DType>(nb::cast<int>(code))).second;
  }

  static Elements elements_of(const Message& message) {
    const auto& [header, data, memory] = message.posting.buffer;
    return {static_cast<DType>(header.sequence), data, static_cast<std::size_t>(header.nbytes)};
  }

  static std::optional<std::int64_t> integer_of(nb::handle object, std::int64_t end) {
    if (!PyLong_CheckExact(object.ptr())) return std::nullopt;
    int overflow = 0;
    const std::int64_t number = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    return overflow == 0 && number >= 0 && number < end ? std::optional(number) : std::nullopt;
  }

  std::optional<std::int32_t> peer_of(nb::handle rank) const {
    const auto peer = integer_of(rank, target_->size());
    return peer && *peer != me_ ? std::optional(static_cast<std::int32_t>(*peer)) : std::nullopt;
  }

  static std::optional<std::uint32_t> tag_of(nb::handle tag) {
    const auto number = integer_of(tag, first_reserved_tag);
    return number ? std::optional(static_cast<std::uint32_t>(*number)) : std::nullopt;
  }

  std::optional<double> limit_of(nb::handle timeout_s) const {
    if (timeout_s.is_none()) return timeout_s_;
    if (!PyFloat_CheckExact(timeout_s.ptr())) return std::nullopt;
    const double seconds = PyFloat_AS_DOUBLE(timeout_s.ptr());
    return seconds > 0 ? std::optional(seconds) : std::nullopt;
  }

  // The call as errors show it.
  static std::string text_of(const Message& message) {
    const Header& header = message.posting.buffer.header;
    const std::string peer = message.peer ? std::to_string(*message.peer) : "any";
    const std::string tag = message.posting.any_tag ? "any" : std::to_string(header.group);
    const char* call = message.sends() ? "send(" : "recv(";
    return call + array_text(header) + (message.sends() ? ", dest=" : ", source=") + peer + ", tag=" + tag + ")";
  }

  nb::object endpoint_;
  Endpoint* target_;
  nb::object array_type_;
  nb::object code_of_;
  nb::object any_source_;
  nb::object any_tag_;
  nb::object on_failure_;
  nb::object on_send_;
  nb::object on_receive_;
  double timeout_s_;
  std::int32_t me_;
  mutable std::vector<std::pair<nb::object, DType>> dtypes_;  // dtypes seen so far
};

// A method, with the arguments of `run_fast_message`.
struct Method {
  const char* name;
  bool (*run)(MessageCalls& calls, PyObject* const* args);
};
constexpr Method methods[] = {
    {"send", [](MessageCalls& calls, PyObject* const* args) { return calls.send(args[1], args[3], args[5], args[6]); }},
    {"recv",
     [](MessageCalls& calls, PyObject* const* args) { return calls.receive(args[2], args[4], args[5], args[6]); }},
    {"sendrecv",
     [](MessageCalls& calls, PyObject* const* args) {
       return calls.exchange(args[1], args[3], args[2], args[4], args[5], args[6]);
     }},
};

PyTypeObject* message_calls_type = nullptr;

}  // namespace

CacheResult run_fast_message(PyObject* calls, PyObject* const* arguments) {
  if (Py_TYPE(calls) != message_calls_type) return CacheResult::miss;
  return or_error(CacheResult::failed, [&] {
    const auto method = std::find_if(std::begin(methods), std::end(methods), [&](const Method& candidate) {
      return PyUnicode_CompareWithASCIIString(arguments[0], candidate.name) == 0;
    });
    if (method == std::end(methods)) return CacheResult::miss;
    return method->run(*nb::inst_ptr<MessageCalls>(calls), arguments) ? CacheResult::hit : CacheResult::miss;
  });
}

void bind_fast_messages(nb::module_& module) {
  nb::class_<MessageCalls>(module, "MessageCalls")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    double>(),
           nb::arg("endpoint"), nb::arg("array_type"), nb::arg("code_of"), nb::arg("any_source"), nb::arg("any_tag"),
           nb::arg("on_failure"), nb::arg("on_send"), nb::arg("on_receive"), nb::arg("timeout_s"))
      .def("send_flat", &MessageCalls::send_flat, nb::arg("x"), nb::arg("dest"), nb::arg("tag"))
      .def("receive_up_to", &MessageCalls::receive_up_to, nb::arg("out"), nb::arg("source"), nb::arg("tag"))
      .def("exchange_up_to", &MessageCalls::exchange_up_to, nb::arg("x"), nb::arg("dest"), nb::arg("tag"),
           nb::arg("out"), nb::arg("source"), nb::arg("tag_received"))
      .def("start_send", &MessageCalls::start_send, nb::arg("x"), nb::arg("dest"), nb::arg("tag"), nb::arg("limit_s"))
      .def("start_receive", &MessageCalls::start_receive, nb::arg("out"), nb::arg("source"), nb::arg("tag"),
           nb::arg("limit_s"))
      .def("start_receive_up_to", &MessageCalls::start_receive_up_to, nb::arg("out"), nb::arg("source"), nb::arg("tag"),
           nb::arg("limit_s"));
  message_calls_type = reinterpret_cast<PyTypeObject*>(module.attr("MessageCalls").ptr());
}

}  // namespace unisono
