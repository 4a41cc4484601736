// The operations of a store client, their requests, and the messages in which these travel; see window.h.
//
//     operation (a call of the program) ──► requests, one for each key ──► messages, of one or many requests
//
// The GIL guards them all, as it guards all of a client: no lock is needed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "channel.h"
#include "python.h"
#include "store/wire/message.h"

namespace rpc_ext::store::client {

// One call of a program.
class StoreOperation final {
 public:
  // `complete(values, digests, written, error, index)` is called once, when all of `count` keys are done: `values` is a
  // list, `digests` a list of numbers, `written` has a byte for each key, and `error` is that of the first key that
  // failed, or None. `join(index, future)` is called for a value that is on its way to a device.
  StoreOperation(std::size_t count, bool has_values, py::object complete, py::object join);

  void end(std::size_t index, const py::object& value, const py::object& error);
  void join(std::size_t index, const py::object& future) {
    const py::object join = join_;  // the end of the operation drops it
    call(join, index, future);
  }
  void set_digest(std::size_t index, std::uint64_t digest);

 private:
  std::size_t left_;
  std::string written_;
  std::vector<py::object> values_;
  std::vector<std::uint64_t> digests_;
  std::size_t failed_ = 0;
  py::object error_ = py::none();
  py::object complete_, join_;
};

using OperationPtr = std::shared_ptr<StoreOperation>;

class Window;
class StoreMessage;
class KeyRequest;
using WindowPtr = std::shared_ptr<Window>;
using MessagePtr = std::shared_ptr<StoreMessage>;
using RequestPtr = std::shared_ptr<KeyRequest>;

// One key of an operation, from the call to the outcome.
class KeyRequest : public std::enable_shared_from_this<KeyRequest> {
 public:
  enum class State : std::uint8_t { waiting, sent, done };

  // `weight`: bytes that count for the window and for the size of a batch.
  KeyRequest(Verb verb, std::string key, OperationPtr operation, std::size_t index, std::uint64_t weight);
  virtual ~KeyRequest() = default;
  KeyRequest(const KeyRequest&) = delete;
  KeyRequest& operator=(const KeyRequest&) = delete;

  // The messages of a request that travels alone. Empty: it travels in a batch.
  virtual std::vector<MessagePtr> messages(const WindowPtr&) { return {}; }

  // The message of this request and others with the same verb.
  virtual MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) = 0;

  // Releases the memory of a request that is done: the window may keep the request itself for a while.
  virtual void drop() {}

  // The value of the request is a future, of a tensor on a device.
  virtual bool gives_future() const noexcept { return false; }

  bool is_done() const noexcept { return state == State::done; }
  virtual KeyEntry entry() const;

  const Verb verb;
  const std::string key;
  const std::size_t index;
  const std::uint64_t weight;
  OperationPtr operation;  // null: the request is done
  State state = State::waiting;
  std::uint64_t sequence = 0;
  double deadline = 0;                // on this process's clock; 0: none
  int holds = 0;                      // reasons for which it cannot be sent yet
  RequestPtr previous;                // on the same key, unless it was done before this one was submitted
  std::vector<RequestPtr> followers;  // of which this one is the previous
};

// A message of requests with the same verb, from the moment that they are put together to the answer.
class StoreMessage : public MessageListener, public std::enable_shared_from_this<StoreMessage> {
 public:
  StoreMessage(WindowPtr window, Verb verb, std::vector<RequestPtr> requests, std::uint64_t nbytes,
               bool is_batch = false);
  StoreMessage(const StoreMessage&) = delete;
  StoreMessage& operator=(const StoreMessage&) = delete;

  virtual void start() = 0;                // sends it: there is room
  virtual void take(Answer&& answer) = 0;  // gives each request its outcome

  // ---- called by the channel, once
  void answered(std::string_view body, const std::vector<at::Tensor>& tensors) override;
  void failed(const py::object& error) override;  // the service did not answer

  const WindowPtr window;
  const Verb verb;
  const bool is_batch;  // the window formed it of small requests
  std::vector<RequestPtr> requests;
  std::uint64_t nbytes;   // that count for the window
  bool has_room = false;  // its bytes count as in flight

 protected:
  // Drops the requests that are done. False: none is left, and the room was given back.
  bool expects_answer();

  // Sends the requests that are not done, without data.
  void send_entries();

  // The error of each entry of an answer, or None.
  std::vector<py::object> errors_of(const Answer& answer) const;

  // Ends each request of an answer that has nothing but errors.
  void end_all(const Answer& answer);

 private:
  void fail_all(const py::object& error);
};

// The exception of Python for one of C++, without its traceback: a program that kept its frames would keep the data.
py::object error_of(const std::exception_ptr& error);

}  // namespace rpc_ext::store::client
