// The operations of a store client, their requests, and the messages in which these travel.
//
//     operation (a call of the program) ──► requests, one for each key ──► messages, of one or many requests
//
// The window's lock guards a request's fields; see window.h. The thread that starts a message, and later the one that
// takes its answer, are the only ones that use it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "api/promise.h"
#include "api/tensors.h"
#include "channel.h"
#include "histogram.h"
#include "python.h"
#include "store/wire/message.h"

namespace rpc_ext::store::client {

namespace api = cudafuture::api;

// An exception of Python, as C++ threads keep and throw it.
class PythonException final : public std::exception {
 public:
  explicit PythonException(py::object exception) : exception_(std::make_shared<Held>(std::move(exception))) {}
  py::object get() const { return py::reinterpret_borrow<py::object>(exception_->get()); }

 private:
  const std::shared_ptr<Held> exception_;
};

// Returns the exception of Python for an error, without its traceback: a program that kept its frames would keep the
// data. Needs the GIL.
py::object to_python(const std::exception_ptr& error);

// The modes of this thread do not apply to a client's own tensors in a block: no inference mode, no dispatch mode.
class PlainTensors {
 private:
  const c10::InferenceMode plain_{false};
  const c10::impl::ExcludeDispatchKeyGuard without_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

class Operations;
using OperationsPtr = std::shared_ptr<Operations>;

// One call of a program. Its future is done when all of its keys are, with the error of the first key that failed.
//
// Lock: mutex_ guards what follows it; nothing is taken under it.
class StoreOperation final : public std::enable_shared_from_this<StoreOperation> {
 public:
  enum class Kind : std::uint8_t { write, read, erase };

  // `targets`: of a read. `results`: receives a byte for each key that was written, or the digests of a read; null:
  // they are not needed. `nbytes`: of a write.
  struct Options {
    int priority = 0;
    std::uint64_t nbytes = 0;
    std::shared_ptr<api::Targets> targets = {};
    bool gives_list = false;
    std::shared_ptr<api::Results> results = {};
  };
  StoreOperation(OperationsPtr operations, Kind kind, std::vector<std::string> keys, Options options);

  ~StoreOperation();
  StoreOperation(const StoreOperation&) = delete;
  StoreOperation& operator=(const StoreOperation&) = delete;

  py::object future() const { return py::reinterpret_steal<py::object>(promise_->future()); }
  const std::string& key(std::size_t index) const { return keys_[index]; }
  api::Targets& targets() const noexcept { return *options_.targets; }
  bool needs_digests() const noexcept { return kind_ == Kind::read && options_.results != nullptr; }

  // ---- called once for each key, by any thread
  void release_source();  // the caller may overwrite the tensor of a key
  // Ends a key; with the last one the future is done. `nbytes`, `digest`: of a tensor that was read.
  void end(std::size_t index, const std::exception_ptr& error, std::uint64_t nbytes, std::uint64_t digest);

 private:
  friend class Operations;

  std::exception_ptr store_results() noexcept;
  void complete();
  void fail(const std::exception_ptr& error);

  const OperationsPtr operations_;
  const Kind kind_;
  const std::vector<std::string> keys_;
  const Options options_;
  const std::shared_ptr<api::Promise> promise_;
  const std::int64_t since_;  // nanoseconds
  std::mutex mutex_;
  std::size_t left_, unreleased_;
  std::uint64_t read_ = 0;  // bytes
  std::string written_;     // a byte for each key
  std::vector<std::uint64_t> digests_;
  std::size_t failed_ = 0;
  std::exception_ptr error_;
};

using OperationPtr = std::shared_ptr<StoreOperation>;

// The pending operations of one client, and the counts of those that are done.
//
// Lock: mutex_ guards what follows it; nothing is taken under it.
class Operations final {
 public:
  // `name_error(error, what, worker)` returns an error that names the operation, its key, and the worker.
  Operations(std::string worker, py::object name_error)
      : worker_(std::move(worker)), name_error_(std::move(name_error)) {}

  const std::string& worker() const noexcept { return worker_; }

  // Returns a future that is done when the pending operations are: all, or only writes and deletions. Needs the GIL.
  py::object flush(bool with_reads);

  struct Statistics {
    std::uint64_t pending, written, read, operations, failed;
    double latency_p50, latency_p99;
  };
  Statistics statistics() const;

 private:
  friend class StoreOperation;
  struct Flush;
  using FlushPtr = std::shared_ptr<Flush>;

  void begin(const StoreOperation& operation);
  void count(const StoreOperation& operation, std::uint64_t nbytes, bool has_failed);
  // Null: it succeeded. Does nothing after the first call for an operation.
  void end(const StoreOperation& operation, const std::shared_ptr<Held>& error);
  std::shared_ptr<Held> named(const std::exception_ptr& error, const std::string& what) const;

  const std::string worker_;
  const Held name_error_;
  mutable std::mutex mutex_;
  std::unordered_map<const StoreOperation*, std::vector<FlushPtr>> pending_;
  std::size_t counted_ = 0;               // of those that are pending: their futures are about to be done
  std::array<std::uint64_t, 3> bytes_{};  // by kind
  std::uint64_t failed_ = 0;
  Histogram latencies_;
};

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
  KeyRequest(Verb verb, OperationPtr operation, std::size_t index, std::uint64_t weight)
      : verb(verb), key(operation->key(index)), index(index), weight(weight), operation(std::move(operation)) {}
  virtual ~KeyRequest() = default;
  KeyRequest(const KeyRequest&) = delete;
  KeyRequest& operator=(const KeyRequest&) = delete;

  // The messages of a request that travels alone. Empty: it travels in a batch.
  virtual std::vector<MessagePtr> messages(const WindowPtr&) { return {}; }

  // The message of this request and others with the same verb.
  virtual MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) = 0;

  // Releases the memory of a request that is done: the window may keep the request itself for a while. Called once,
  // without the window's lock; no thread uses that memory afterwards.
  virtual void drop() {}

  virtual KeyEntry entry() const;  // under the window's lock

  const Verb verb;
  const std::string key;
  const std::size_t index;
  const std::uint64_t weight;

  // ---- guarded by the window's lock
  OperationPtr operation;  // null: the request is done
  State state = State::waiting;
  std::uint64_t sequence = 0;
  double deadline = 0;                // on this process's clock; 0: none
  int holds = 0;                      // reasons for which it cannot be sent yet
  RequestPtr previous;                // on the same key, unless it was done before this one was submitted
  std::vector<RequestPtr> followers;  // of which this one is the previous
};

// One entry of a message.
struct SentEntry {
  RequestPtr request;
  std::uint32_t part = 0;
  std::uint64_t at = 0, length = 0, digest = 0;  // of PUT: the place of its bytes in the data
};

// A message of requests with the same verb, from the moment that they are put together to the answer.
class StoreMessage : public MessageListener, public std::enable_shared_from_this<StoreMessage> {
 public:
  StoreMessage(WindowPtr window, Verb verb, std::vector<SentEntry> entries, std::uint64_t nbytes)
      : window(std::move(window)), verb(verb), entries(std::move(entries)), nbytes(nbytes) {}
  StoreMessage(const StoreMessage&) = delete;
  StoreMessage& operator=(const StoreMessage&) = delete;

  virtual void start() = 0;                            // prepares the data, and sends the message: there is room
  virtual void take(Answer&& answer) = 0;              // gives each request its outcome
  virtual void fail(const std::exception_ptr& error);  // there is no answer

  // ---- called by the channel, once
  void answered(std::string_view body, const std::vector<at::Tensor>& tensors) override;
  void failed(const py::object& error) override;  // the service did not answer

  void end_all(const Answer& answer);  // whose entries have nothing but errors

  // Calls a function; its exception fails the message.
  void go_on(const std::function<void()>& step);
  // Calls a function on a thread that may block.
  void go_on_elsewhere(std::function<void()> step);

  const WindowPtr window;
  const Verb verb;
  std::vector<SentEntry> entries;
  at::Tensor data;             // of PUT
  const std::uint64_t nbytes;  // that count for the window

  // ---- guarded by the window's lock
  bool has_room = false;    // its bytes count as in flight
  bool is_counted = false;  // it counts as one of the batches of its verb
};

// Returns the entries of requests that travel as a whole.
std::vector<SentEntry> entries_of(std::vector<RequestPtr> requests);

// Returns the error of each entry of an answer; null: none.
std::vector<std::exception_ptr> errors_of(const StoreMessage& message, const Answer& answer);

}  // namespace rpc_ext::store::client
