#include "channel.h"

#include <c10/util/Exception.h>
#include <unistd.h>

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
    if (state_ == nullptr) return;
    if (const Gil gil; gil) {
      drop();
    } else {
      state_.release();  // Python is going away: leaked
    }
  }

  void on_reply(std::string_view payload, const std::vector<at::Tensor>& tensors) override {
    const bool is_answer = is_of_channel(payload);
    end(payload.size() + size_of(tensors), !is_answer, [&](const Channel& channel, MessageListener& listener) {
      if (is_answer) {
        listener.answered(payload.substr(kChannelHeader), tensors);
      } else {
        listener.failed(channel.error(payload));
      }
    });
  }

  void on_error(CallFailure kind, const std::string& message) override {
    end(0, true, [&](const Channel& channel, MessageListener& listener) {
      listener.failed(channel.error(kind, message, seconds_));
    });
  }

  void drop() override { state_.reset(); }

 private:
  // Counts the end, and passes it to the listener even if a waiting call could not be admitted; once.
  template <class Tell>
  void end(std::uint64_t received, bool has_failed, const Tell& tell) {
    if (std::exchange(has_ended_, true)) return;
    std::exception_ptr met;
    try {
      state_->channel->destination().finish(size_, started_, received, has_failed);
    } catch (...) {
      met = std::current_exception();
    }
    tell(*state_->channel, *state_->listener);
    if (met) std::rethrow_exception(met);
  }

  // Objects that only a thread with the GIL may drop.
  struct State {
    State(std::shared_ptr<const Channel> channel, std::shared_ptr<MessageListener> listener)
        : channel(std::move(channel)), listener(std::move(listener)) {}

    const std::shared_ptr<const Channel> channel;
    const std::shared_ptr<MessageListener> listener;
  };

  std::unique_ptr<State> state_;
  const std::uint64_t size_;
  const double seconds_;
  const double started_ = now();
  bool has_ended_ = false;
};

}  // namespace

Channel::Channel(const std::shared_ptr<Agent>& agent, py::object destination, unsigned char number, std::string name,
                 Errors errors)
    : agent_(agent),
      process_(getpid()),
      destination_(std::move(destination)),
      to_(destination_.cast<DestinationPtr>()),
      name_(std::move(name)),
      header_(header_of(number)),
      errors_(std::move(errors)) {}

bool Channel::send(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
                   std::shared_ptr<MessageListener> listener) {
  auto agent = agent_.lock();
  if (agent == nullptr || getpid() != process_ || !agent->is_current()) {
    agent.reset();
    call(errors_.raise_ended);
  }
  const std::uint64_t size = body.size() + size_of(tensors);
  if (!to_->try_admit(size)) {
    call(destination_.attr("flush"));
    return false;
  }
  Bytes payload;
  std::shared_ptr<SentMessage> sent;
  try {
    payload.assign(header_.begin(), header_.end());
    payload.insert(payload.end(), body.begin(), body.end());
    sent = std::make_shared<SentMessage>(shared_from_this(), std::move(listener), size, seconds);
  } catch (...) {
    to_->give_back(size);
    throw;
  }
  std::string problem;
  try {
    const GilRelease without_gil;  // torch's locks are taken while others wait for the GIL under them
    agent->call(to_->rank, std::move(payload), std::move(tensors), static_cast<float>(seconds), sent);
    return true;
  } catch (const c10::Error& e) {
    problem = e.what_without_backtrace();
  } catch (const std::exception& e) {  // the engine's: a dead pipe
    problem = e.what();
  }
  sent->on_error(CallFailure::other, problem);
  return true;
}

py::object Channel::error(std::string_view reply) const {
  return call(errors_.of_reply, py::bytes(reply.data(), reply.size()), name_, to_->name);
}

py::object Channel::error(CallFailure kind, const std::string& message, double seconds) const {
  const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(message.data(), message.size(), "replace"));
  return call(errors_.of_engine, static_cast<int>(kind), text, name_, destination_, seconds);
}

}  // namespace rpc_ext
