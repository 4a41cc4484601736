// The sending end of a channel: messages of bytes and tensors, without pickling, to a handler on another worker.
//
//     Channel::send ──► Destination::try_admit ──► Agent::call, send, pipeWrite ═══► RequestCallback::processMessage
//                                                                                         ▼
//     MessageListener ◄── Destination::finish ◄── SentMessage ◄═══ Reply::send ◄── MessageHandler::handle, or Python
//
// Messages count as calls: they take room at their destination and are sealed, and a graceful shutdown waits for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "agent.h"
#include "destination.h"
#include "python.h"

namespace rpc_ext {

// Takes the reply to a message. A thread of the agent, or the sender within send(), calls one of its methods, once,
// unless Python is going away. It must not block. Any thread may drop it, with or without the GIL.
class MessageListener {
 public:
  virtual ~MessageListener() = default;

  // Called without the GIL. No error of Python leaves it.
  virtual void answered(std::string_view body, const std::vector<at::Tensor>& tensors) = 0;

  // Called with the GIL. `error`: an exception of Python, of the handler or of the connection.
  virtual void failed(const py::object& error) = 0;
};

// Any thread may use and drop it.
class Channel final : public std::enable_shared_from_this<Channel> {
 public:
  enum class Outcome { sent, no_room, ended };

  // Functions of Python that return errors.
  struct Errors {
    Held of_end;     // (): the error of a session that has ended
    Held of_reply;   // (payload, name, worker): the error in a reply
    Held of_engine;  // (kind, message, name, destination, seconds): the error of a message without a reply
  };

  // `number` and `name`: of the handler; the name is for error messages.
  Channel(const std::shared_ptr<Agent>& agent, py::object destination, unsigned char number, std::string name,
          Errors errors);

  // Sends a message, and returns at once. Its tensors are dense, on the host, and do not change until the reply.
  // `seconds`: timeout of the reply; 0: no limit. Called with or without the GIL, and without a mutex that the listener
  // takes: the listener is called unless the destination has no room, or the session has ended.
  //
  // The GIL is taken only if the destination has no room, or the message fails at once. Then errors of Python are
  // thrown to a caller that has the GIL.
  Outcome send(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
               std::shared_ptr<MessageListener> listener);

  Destination& destination() const noexcept { return *to_; }

  // ---- with the GIL
  py::handle python_destination() const noexcept { return destination_.get(); }

  // The error of a session that has ended.
  py::object error() const { return call(errors_.of_end.get()); }

  // The error of a message without a reply.
  py::object error(CallFailure kind, const std::string& message, double seconds) const;

  // The error in a reply of another kind than this channel's.
  py::object error(std::string_view reply) const;

 private:
  void flush() const;

  const std::weak_ptr<Agent> agent_;
  const Held destination_;
  const DestinationPtr to_;
  const std::string name_, header_;
  const Errors errors_;
};

}  // namespace rpc_ext
