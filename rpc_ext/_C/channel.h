// The sending end of a channel: messages of bytes and tensors, without pickling, to a handler on another worker.
//
//     Channel::send ──► Destination::try_admit ──► Agent::call ════► MessageHandler, or handler(body, tensors, reply)
//     listener      ◄── Destination::finish    ◄── on_reply    ◄════ Reply::send
//
// Messages count as calls: they take room at their destination and are sealed, and a graceful shutdown waits for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "agent.h"
#include "destination.h"
#include "python.h"

namespace rpc_ext {

// Takes the reply to a message. A thread of the agent calls one of its methods, once, with the GIL; it must not block.
class MessageListener {
 public:
  virtual ~MessageListener() = default;  // with the GIL
  virtual void answered(std::string_view body, const std::vector<at::Tensor>& tensors) = 0;
  virtual void failed(const py::object& error) = 0;  // of the handler, or of the connection
};

// The GIL guards it.
class Channel final : public std::enable_shared_from_this<Channel> {
 public:
  // Functions of Python, for errors.
  struct Errors {
    py::object raise_ended;  // (): raises the error of a session that has ended
    py::object of_reply;     // (payload, name, worker): the error in a reply
    py::object of_engine;    // (kind, message, name, destination, seconds): the error of a message without a reply
  };

  // `number` and `name`: of the handler; the name is for error messages.
  Channel(const std::shared_ptr<Agent>& agent, py::object destination, unsigned char number, std::string name,
          Errors errors);

  // Sends a message, and returns at once. Its tensors are dense, on the host, and do not change until the reply.
  // `seconds`: timeout of the reply; 0: no limit. False: the destination has no room. Throws InvalidStateError of
  // Python after the end of the session.
  bool send(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
            std::shared_ptr<MessageListener> listener);

  Destination& destination() const noexcept { return *to_; }
  const py::object& python_destination() const noexcept { return destination_; }

  // The error of a message without a reply.
  py::object error(CallFailure kind, const std::string& message, double seconds) const;

  // The error in a reply of another kind than this channel's.
  py::object error(std::string_view reply) const;

 private:
  const std::weak_ptr<Agent> agent_;
  const pid_t process_;
  const py::object destination_;
  const DestinationPtr to_;
  const std::string name_, header_;
  const Errors errors_;
};

}  // namespace rpc_ext
