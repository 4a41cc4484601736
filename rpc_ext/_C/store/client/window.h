// The window of a store client: which requests are sent, which wait, and which are too late.
//
//     submit ──► held until the request before it on its key was sent ──► ready ──► batch ──┐
//                (and its bytes are on the host)                 └──► a large tensor's parts ┴─► outgoing
//     outgoing ──► as many bytes in flight as the service allows ──► StoreMessage::start ──► channel
//
// The service orders the operations on a key, so a request does not wait for the answer to the one before it. Small
// requests travel many at a time: those that become ready while a batch of their kind is in flight go with the next
// one, and a full batch goes at once (J. Nagle, RFC 896). All requests of a client have the same timeout, so the oldest
// expires first, wherever it is.
//
// The GIL guards the window, its requests and its messages. It is released for copies of many bytes and while the agent
// sends a message.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "channel.h"
#include "store/client/request.h"
#include "store/wire/message.h"

namespace rpc_ext::store::client {

// Sends the requests of one client.
class Window final : public std::enable_shared_from_this<Window> {
 public:
  // `channel`: a Channel, or an object of Python with its `send`. `size`: bytes that may be in flight; a message of
  // more goes when nothing else is in flight. `seconds`: that each request has; 0: no limit. `buffers`: SendBuffers of
  // Python, for batches.
  Window(py::object channel, std::string service, std::string token, std::string worker, std::uint64_t size,
         double seconds, py::object buffers);

  // Takes requests in the order in which they are to take effect. Throws the interrupt (Ctrl-C) that a message met.
  void submit(const std::vector<RequestPtr>& requests);

  void release_hold(const RequestPtr& request);           // its bytes have reached the host
  void enqueue(const std::vector<MessagePtr>& messages);  // of requests that were sent before

  // Sends the messages that there is room for. A message that fails at once calls this again: the outer call sends the
  // next. Returns the interrupt that a message met, which has failed with it; or None.
  py::object go_on();

  // Sends a message that has been given room. Where RPC has none, it is sent again after a pause.
  void send(StoreMessage& message, std::vector<KeyEntry> entries, const at::Tensor& data);
  void mark_sent(const std::vector<RequestPtr>& requests);  // releases those that follow them
  void release(StoreMessage& message);  // gives back the room of a message that is over, once, and sends the next ones

  // Gives a request its outcome; false if it has one. `answered`: the service has answered it, so that it cannot arrive
  // there any more.
  bool end(const RequestPtr& request, const py::object& value, const py::object& error, bool answered = true);

  // Submits a request in place of one that was answered, with the deadline of that one. No later request may have been
  // submitted on the key.
  void replace(const RequestPtr& request, const RequestPtr& by);

  void abandon(const RequestPtr& request);  // tells the service that it may never arrive as a whole

  // Fails the requests that have expired, and sends again messages that RPC had no room for. Called by the timer
  // thread.
  std::optional<double> look(double now);

  // The bytes in flight, the bytes that wait, the size of the window, and the number of requests that were replaced.
  std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t> statistics() const;

  // Calls `go_on` with a future that is done, on the thread that continues operations.
  template <class GoOn>
  void when_done(const py::object& future, GoOn go_on) const {
    py::dict options;
    options["executor"] = store_thread;
    call_with(future.attr("add_done_callback"), py::make_tuple(py::cpp_function(std::move(go_on))), options);
  }

  // Returns the digests of parts of the data, given as offsets and lengths. `seeds`: one for each; none: all are 0.
  std::vector<std::uint64_t> digests_of(const at::Tensor& data,
                                        const std::vector<std::pair<std::uint64_t, std::uint64_t>>& places,
                                        const std::optional<std::vector<std::uint64_t>>& seeds = std::nullopt) const;

  double seconds() const noexcept { return seconds_; }
  void set_seconds(double seconds);  // of the requests from now on, which no earlier one outlives

  const py::object& channel() const noexcept { return channel_; }
  void set_channel(py::object channel);

  std::string token;
  std::uint64_t size;

  // ---- functions and classes of Python
  const py::object buffers, store_thread, future_class, digest, digest_class, expected_digest_class, expect_digest,
      checksum_error, error_from;

 private:
  void enter(const RequestPtr& request);
  void remove_hold(const RequestPtr& request);
  void make_ready(const RequestPtr& request);
  MessagePtr next();
  bool is_full(std::size_t verb) const;
  MessagePtr form_batch(std::size_t verb);
  void unchain(const RequestPtr& request, bool was_sent);
  void take_oldest();
  void set_timer(double due);
  bool pass_on(std::string_view body, std::vector<at::Tensor> tensors, double seconds, const MessagePtr& message);

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

  const py::object digests_, schedule_;
  py::object channel_;
  Channel* native_channel_ = nullptr;  // null: the channel is an object of Python
  const std::string service_, worker_;
  double seconds_;
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
