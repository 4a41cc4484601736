// The window of a store client: which requests are sent, which wait, and which are too late.
//
//     submit ──► held until the request before it on its key was sent ──► ready ──► batch ──┐
//                (and its bytes are on the host)                 └──► a large tensor's parts ┴─► outgoing
//     outgoing ──► as many bytes in flight as the service allows ──► StoreMessage::start ──► send ──► channel
//
// The service orders the operations on a key, so a request does not wait for the answer to the one before it. Small
// requests travel many at a time: those that become ready while a batch of their kind is in flight go with the next
// one, and a full batch goes at once (J. Nagle, RFC 896). All requests of a client have the same timeout, so the oldest
// expires first, wherever it is.
//
// Any thread calls the window, with or without the GIL.
//
// Lock: mutex_ guards the window and the fields of its requests. Under it, nothing is sent, no operation ends, the GIL
// is not taken, and nothing of Python's is dropped: a request that is done has dropped its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "api/buffer_pool.h"
#include "store/client/request.h"

namespace rpc_ext::store::client {

// Carries messages to the service.
class MessageSender {
 public:
  virtual ~MessageSender() = default;  // any thread
  // Returns false if RPC has no room for the message. Throws PythonException if it cannot be sent.
  virtual bool send(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
                    const MessagePtr& message) = 0;
};
using MessageSenderPtr = std::shared_ptr<MessageSender>;

// The end of a request.
struct RequestEnd {
  std::exception_ptr error = nullptr;  // null: it succeeded
  std::uint64_t nbytes = 0;            // of a tensor that was read
  std::uint64_t digest = 0;
  bool is_answered = true;  // the service has answered it, so that it cannot arrive there any more
};

// Sends the requests of one client.
class Window final : public std::enable_shared_from_this<Window> {
 public:
  struct Options {
    MessageSenderPtr sender;
    std::string service, token;
    std::uint64_t size;  // bytes that may be in flight; a message of more goes when nothing else is in flight
    double seconds;      // that each request has; 0: no limit
    // Calls look() at a time of this process's clock, on any thread, now or later. Takes the GIL.
    std::function<void(const WindowPtr&, double)> set_timer;
  };
  Window(OperationsPtr operations, Options options);

  const OperationsPtr& operations() const noexcept { return operations_; }

  // Takes requests in the order in which they are to take effect. Throws if no thread is left for their deadlines; they
  // have failed then.
  void submit(const std::vector<RequestPtr>& requests);

  void release_hold(const RequestPtr& request);           // its bytes have reached the host
  void enqueue(const std::vector<MessagePtr>& messages);  // of requests that were sent before

  // Sends the messages that there is room for. A message that fails at once calls this again: the outer call sends the
  // next.
  void go_on();

  // Sends a message that has been given room and data, without the entries of requests that are done. Requests that
  // follow the others may be sent from then on. Where RPC has no room, the message starts again after a pause.
  void send(StoreMessage& message);
  bool has_pending(StoreMessage& message);  // drops the entries of requests that are done; false: none is left
  void release(StoreMessage& message);      // returns the room of a message that is over, once; sends the next ones

  // Gives a request its outcome; false if it has one.
  bool end(const RequestPtr& request, const RequestEnd& outcome);

  // Submits a request in place of one that was answered, with the deadline of that one. False: that one is done, or a
  // later request was submitted on the key.
  bool replace(const RequestPtr& request, const RequestPtr& by);

  void abandon(const RequestPtr& request);  // tells the service that it may never arrive as a whole
  bool is_done(const KeyRequest& request) const;

  // Fails the requests that have expired, and sends again messages that RPC had no room for. Returns the time of the
  // next call; none: there is none to come.
  std::optional<double> look(double now);

  struct Statistics {
    std::uint64_t in_flight, waiting, size, replaced;  // bytes; requests
  };
  Statistics statistics() const;

  api::BufferPool& buffers() const noexcept { return *buffers_; }
  Options options() const;
  void set_options(Options options);  // for the requests from now on, which no earlier one outlives

 private:
  using Lock = std::unique_lock<std::mutex>;

  // ---- under the lock
  void enter(const RequestPtr& request);
  void remove_hold(const RequestPtr& request);
  void make_ready(const RequestPtr& request);
  MessagePtr next();
  bool is_full(std::size_t verb) const;
  MessagePtr form_batch(std::size_t verb);
  void unchain(const RequestPtr& request, bool was_sent);
  void drop_done(StoreMessage& message);
  void drop_oldest();
  StoreRequest request_of(StoreMessage& message);

  void pause(StoreMessage& message);

  struct Ready {
    std::deque<RequestPtr> requests;
    std::uint64_t nbytes = 0;
    int batches = 0;  // outgoing and in flight
  };

  // A request, and the sequence number of the first request in its place. Deadlines and numbers are in ascending order.
  struct Issued {
    RequestPtr request;
    std::uint64_t sequence;
  };

  const OperationsPtr operations_;
  const std::shared_ptr<api::BufferPool> buffers_;  // for batches
  mutable std::mutex mutex_;
  Options options_;
  std::uint64_t in_flight_ = 0;  // bytes
  std::uint64_t sequence_ = 0;
  std::uint64_t replaced_ = 0;                        // requests
  std::unordered_map<std::string, RequestPtr> last_;  // by key: the last request that is not done
  std::deque<Issued> issued_;                         // in order; requests that are done leave at the front
  bool timer_runs_ = false;
  std::array<Ready, 4> ready_;  // by verb
  std::deque<MessagePtr> outgoing_;
  bool is_held_ = false;  // RPC has no room for the first outgoing message
};

}  // namespace rpc_ext::store::client
