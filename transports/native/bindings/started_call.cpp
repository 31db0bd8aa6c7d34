#include "started_call.h"

#include <nanobind/stl/vector.h>

#include "endpoint/message_shape.h"

namespace nb = nanobind;

namespace unisono {

StartedCall::StartedCall(nb::object endpoint, Kept kept, std::unique_ptr<Request> request)
    : held_endpoint_(std::move(endpoint)),
      kept_(std::move(kept)),
      endpoint_(&nb::cast<Endpoint&>(held_endpoint_)),
      request_(std::move(request)) {}

StartedCall::~StartedCall() {
  if (request_ == nullptr) return;
  const bool done = request_->outcome() == Outcome::done;
  request_.reset();  // ends the call if it has not ended
  if (done || !endpoint_->memory_must_leak()) return;
  for (nb::object& owner : kept_) owner.release();
}

int StartedCall::poll() { return outcome_of(endpoint_->abandoned() ? Outcome::failed : endpoint_->poll(*request_)); }

int StartedCall::wait(double timeout_s) {
  Outcome outcome = endpoint_->abandoned() ? Outcome::failed : request_->outcome();
  if (outcome == Outcome::pending) {
    const LockReleased unlocked;
    outcome = endpoint_->wait(*request_, timeout_s, interrupted);
  }
  return outcome_of(outcome);
}

void StartedCall::run_in_background(double timeout_s) {
  if (!endpoint_->abandoned()) endpoint_->run_in_background(*request_, timeout_s);
}

void StartedCall::cancel() {
  if (!endpoint_->abandoned()) endpoint_->cancel(*request_);
}

nb::object message_of(const Request& request) {
  if (request.outcome() != Outcome::done || !request.matched()) return nb::none();
  const auto& [source, header] = *request.matched();
  return nb::make_tuple(source, header.group, header.sequence, header.nbytes);
}

nb::object StartedCall::message() const { return message_of(*request_); }

nb::object StartedCall::host_copy() const {
  if (request_->outcome() != Outcome::done || request_->host_copy().empty()) return nb::none();
  return nb::bytes(request_->host_copy().data(), request_->host_copy().size());
}

nb::object StartedCall::acknowledge() const {
  const auto& taken = request_->matched();
  if (endpoint_->abandoned() || !taken || taken->header.segment == 0) return nb::none();
  auto request = endpoint_->start(Message::to_acknowledge(*taken), call_site());
  return nb::cast(StartedCall(held_endpoint_, {}, std::move(request)));
}

bool StartedCall::fits(std::uint32_t dtype, std::uint64_t nbytes, const std::vector<std::int64_t>& shape) const {
  if (!request_->matched()) return false;
  const Header& header = request_->matched()->header;
  return header.sequence == dtype && header.nbytes == nbytes && shapes_fit(header.digest, shape_code(shape));
}

void bind_started_call(nb::module_& module) {
  nb::class_<StartedCall>(module, "StartedCall")
      .def("poll", &StartedCall::poll)
      .def("wait", &StartedCall::wait, nb::arg("timeout_s"))
      .def("run_in_background", &StartedCall::run_in_background, nb::arg("timeout_s"))
      .def("cancel", &StartedCall::cancel)
      .def("message", &StartedCall::message)
      .def("acknowledge", &StartedCall::acknowledge)
      .def("host_copy", &StartedCall::host_copy)
      .def("fits", &StartedCall::fits, nb::arg("dtype"), nb::arg("nbytes"), nb::arg("shape"));
}

}  // namespace unisono
