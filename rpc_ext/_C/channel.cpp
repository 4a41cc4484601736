#include "channel.h"

#include <c10/util/Exception.h>

#include <utility>

#include "clock.h"
#include "message_handler.h"

namespace rpc_ext {
namespace {

std::uint64_t size_of(const std::vector<at::Tensor>& tensors) {
  std::uint64_t size = 0;
  for (const at::Tensor& tensor : tensors) size += tensor.layout() == at::kStrided ? tensor.nbytes() : 0;
  return size;
}

// A message in flight.
class SentMessage final : public CallListener {
 public:
  SentMessage(std::shared_ptr<const Channel> channel, std::shared_ptr<MessageListener> listener, std::uint64_t size,
              double seconds)
      : state_(std::make_unique<State>(std::move(channel), std::move(listener))), size_(size), seconds_(seconds) {}

  ~SentMessage() override {
    if (is_finalizing()) state_.release();  // leaked, with all that it holds
  }

  void on_reply(std::string_view payload, const std::vector<at::Tensor>& tensors) override {
    const std::uint64_t received = payload.size() + size_of(tensors);
    if (!is_of_channel(payload)) {
      fail(received, [&](const Channel& channel) { return channel.error(payload); });
    } else if (const auto state = std::exchange(state_, nullptr)) {
      state->channel->destination().finish(size_, started_, received, false);
      state->listener->answered(payload.substr(kChannelHeader), tensors);
    }
  }

  void on_error(CallFailure kind, const std::string& message) override {
    fail(0, [&](const Channel& channel) { return channel.error(kind, message, seconds_); });
  }

 private:
  struct State {
    State(std::shared_ptr<const Channel> channel, std::shared_ptr<MessageListener> listener)
        : channel(std::move(channel)), listener(std::move(listener)) {}

    const std::shared_ptr<const Channel> channel;
    const std::shared_ptr<MessageListener> listener;
  };

  // Tells the listener of the failure even if a waiting call could not be admitted.
  template <class Error>
  void fail(std::uint64_t received, const Error& error) {
    const auto state = std::exchange(state_, nullptr);
    if (!state) return;
    run_with_gil("rpc_ext: completing a message", [&] {
      std::exception_ptr met;
      try {
        state->channel->destination().finish(size_, started_, received, true);
      } catch (const std::exception&) {
        met = std::current_exception();
      }
      state->listener->failed(error(*state->channel));
      if (met) std::rethrow_exception(met);
    });
  }

  std::unique_ptr<State> state_;  // null: the message has ended
  const std::uint64_t size_;
  const double seconds_;
  const double started_ = now();
};

}  // namespace

Channel::Channel(const std::shared_ptr<Agent>& agent, py::object destination, unsigned char number, std::string name,
                 Errors errors)
    : agent_(agent),
      destination_(std::move(destination)),
      to_(destination_.get().cast<DestinationPtr>()),
      name_(std::move(name)),
      header_(header_of(number)),
      errors_(std::move(errors)) {}

Channel::Outcome Channel::send(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
                               std::shared_ptr<MessageListener> listener) {
  const auto agent = agent_.lock();
  if (agent == nullptr || !agent->is_current()) return Outcome::ended;
  const std::uint64_t size = body.size() + size_of(tensors);
  const auto sent = std::make_shared<SentMessage>(shared_from_this(), std::move(listener), size, seconds);
  Bytes payload(header_.begin(), header_.end());
  payload.insert(payload.end(), body.begin(), body.end());
  if (!to_->try_admit(size)) {
    flush();
    return Outcome::no_room;
  }
  try {
    agent->call(to_->rank, std::move(payload), std::move(tensors), static_cast<float>(seconds), sent);
  } catch (const c10::Error& e) {
    sent->on_error(CallFailure::other, e.what_without_backtrace());
  } catch (const std::exception& e) {  // the engine's: a dead pipe
    sent->on_error(CallFailure::other, e.what());
  }
  return Outcome::sent;
}

// Sends the calls that wait in batches. Ctrl-C during that does not fail the message, which can be sent later.
void Channel::flush() const {
  const Gil gil;
  if (!gil) return;
  try {
    call(destination_.get().attr("flush"));
  } catch (py::error_already_set& e) {
    if (e.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();
    } else {
      e.discard_as_unraisable("rpc_ext: flushing batches");
    }
  }
}

py::object Channel::error(std::string_view reply) const {
  return call(errors_.of_reply.get(), py::bytes(reply.data(), reply.size()), name_, to_->name);
}

py::object Channel::error(CallFailure kind, const std::string& message, double seconds) const {
  const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(message.data(), message.size(), "replace"));
  return call(errors_.of_engine.get(), static_cast<int>(kind), text, name_, destination_.get(), seconds);
}

}  // namespace rpc_ext
