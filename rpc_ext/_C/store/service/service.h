// The request handler of a store service.
//
// One small write, continued from the client:
//
//      6  MessageRoute::handle      parses the request, finds the service and the session     service, wire/parser
//      7  Changing::begin           takes room in the client's window                         service
//      8  RequestOrder::enqueue     after the client's earlier operations on the key          order
//      9  KeyQueues::enter          after all earlier changes of the key                      order
//     10  Namespace::write          quota, the store, the answer                              namespace
//
// A part of a large tensor goes the same way with Upload in place of Changing. A read goes the same way with Reading:
// it takes its snapshot at its turn in the per-key queue. The operations that a request begins continue in threads of
// the store, which answer without the interpreter.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "histogram.h"
#include "message_handler.h"
#include "store/service/store_session.h"
#include "store/wire/message.h"

namespace rpc_ext::store {

// Lock: mutex_ guards what follows it; nothing is taken under it.
class Service final : public std::enable_shared_from_this<Service> {
 public:
  using ReplyPtr = std::shared_ptr<Reply>;
  using SessionPtr = std::shared_ptr<StoreSession>;

  // `window`: bytes that each client may have in flight.
  Service(StorePtr store, std::uint64_t window) : store_(std::move(store)), window_(window) {}

  api::Store& store() const noexcept { return *store_; }

  // ---- sessions, by token
  void add(const std::string& token, SessionPtr session);
  void remove(const std::string& token);
  SessionPtr find(const std::string& token) const;  // null: there is none

  // Handles a request, and answers it now or later.
  void handle(StoreRequest&& request, const SessionPtr& session, const ReplyPtr& reply);

  // ---- counts
  struct Counted {
    std::uint64_t nbytes;
    double since;
  };
  // Counts a request as in flight. None: the client has more in flight than twice its window.
  std::optional<Counted> count_in(StoreSession& session, std::uint64_t nbytes);
  void count_out(StoreSession& session, const Counted& counted);
  void count(std::uint64_t written, std::uint64_t read, std::uint64_t refused);
  const std::shared_ptr<std::atomic<std::uint64_t>>& late() const noexcept { return late_; }
  Problem over_window(const StoreSession& session) const;

  struct Statistics {
    std::uint64_t in_flight, most_in_flight, written, read, requests, refused, late;
    double latency_p50, latency_p99;
  };
  Statistics statistics() const;

 private:
  void write_part(StoreRequest&& request, const SessionPtr& session, const ReplyPtr& reply, const Counted& counted);

  const StorePtr store_;
  const std::uint64_t window_;
  const std::shared_ptr<std::atomic<std::uint64_t>> late_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  mutable std::mutex mutex_;
  std::unordered_map<std::string, SessionPtr> sessions_;
  std::uint64_t in_flight_ = 0, most_in_flight_ = 0, written_ = 0, read_ = 0, refused_ = 0;
  Histogram latencies_;
};

// The services of this process by name, and the way of a message to its service.
//
// Lock: mutex_ guards the services; nothing is taken under it.
class MessageRoute final : public MessageHandler {
 public:
  static MessageRoute& get();

  void add(const std::string& name, std::shared_ptr<Service> service);
  void remove(const std::string& name);

  // False: the message makes no sense, or its session is not known: Python raises the error, or resumes the session.
  bool handle(std::string_view body, const std::vector<at::Tensor>& tensors,
              const std::shared_ptr<Reply>& reply) override;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Service>, std::less<>> services_;
};

// Sends the answer to a request.
void send_answer(Reply& reply, std::size_t count, const Errors& errors, Verb verb = Verb::put,
                 const std::vector<Found>& entries = {}, const at::Tensor& data = {});

}  // namespace rpc_ext::store
