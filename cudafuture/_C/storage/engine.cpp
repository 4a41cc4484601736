#include "storage/engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <new>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "storage/failure.h"
#include "storage/ring.h"
#include "storage/threads.h"

namespace cudafuture::storage {
namespace {

// Every engine that runs, so that the process can end. Leaked: engines may live to its very end.
struct Running {
  std::mutex mutex;
  std::list<std::weak_ptr<Engine>> engines;
};
Running& running() {
  static auto* const running = new Running;
  return *running;
}

std::byte* map_memory(std::size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount = 1) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace

void Engine::Line::push(Operation* operation) noexcept {
  operation->next_in_line = nullptr;
  operation->is_in_line = true;
  (last_ == nullptr ? first_ : last_->next_in_line) = operation;
  last_ = operation;
}

Operation* Engine::Line::pop() noexcept {
  Operation* const operation = first_;
  first_ = operation->next_in_line;
  if (first_ == nullptr) last_ = nullptr;
  operation->is_in_line = false;
  return operation;
}

void Engine::Line::append(Line& other) noexcept {
  if (other.empty()) return;
  (last_ == nullptr ? first_ : last_->next_in_line) = other.first_;
  last_ = other.last_;
  other.first_ = other.last_ = nullptr;
}

// ---- begin and end

std::shared_ptr<Engine> Engine::start(const Options& options) {
  refuse_after_fork();
  mark_used();
  std::shared_ptr<Engine> engine(new Engine(options));
  engine->self_ = engine;
  {
    Running& all = running();
    std::lock_guard lock(all.mutex);
    all.engines.remove_if([](const std::weak_ptr<Engine>& other) { return other.expired(); });
    all.engines.push_back(engine);
  }
  at_shut_down(close_all);
  if (!ThreadCache::get().run(engine.get())) {
    engine->self_ = nullptr;
    throw Error(ErrorKind::invalid_state, "the process is going away: no storage engine begins any more");
  }
  std::unique_lock lock(engine->mutex_);
  engine->changed_.wait(lock, [&] { return engine->is_set_up_ || engine->has_ended_; });
  if (!engine->is_set_up_) throw Failure("no storage engine: " + engine->why_not_, ENOSYS, "");
  return engine;
}

Engine::Engine(const Options& options)
    : options_(options), buffers_(map_memory(options.queue_depth * options.block_size)), blocks_(options.queue_depth) {
  free_.reserve(blocks_.size());
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    blocks_[i].buffer = buffers_ + i * options.block_size;
    blocks_[i].buffer_size = options.block_size;
    free_.push_back(&blocks_[i]);
  }
}

Engine::~Engine() { ::munmap(buffers_, options_.queue_depth * options_.block_size); }

void Engine::close() noexcept {
  if (is_forked_child()) return;
  bool wake;
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    wake = std::exchange(wants_wake_, false);
    if (wake) backend_->wake();
  }
  changed_.notify_all();
}

void Engine::let_go() noexcept {
  std::lock_guard lock(mutex_);
  if (faults_ != nullptr) faults_->let_go();
}

void Engine::join() noexcept {
  if (is_forked_child()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_ended_; });
}

void Engine::close_all() noexcept {
  std::list<std::weak_ptr<Engine>> engines;
  {
    Running& all = running();
    std::lock_guard lock(all.mutex);
    engines.swap(all.engines);
  }
  for (const std::weak_ptr<Engine>& other : engines) {
    if (const std::shared_ptr<Engine> engine = other.lock()) engine->close();
  }
}

bool Engine::set_up() noexcept {
  try {
    const std::size_t bytes = options_.queue_depth * options_.block_size;
    if (options_.backend != BackendKind::threads) backend_ = make_ring(blocks_.size(), buffers_, bytes, why_not_);
    if (backend_ == nullptr) {
      if (options_.backend == BackendKind::io_uring) return false;
      backend_ = std::make_unique<Threads>(options_.threads);
    }
    if (options_.faults) {
      auto faults = std::make_unique<Faults>(std::move(backend_), *options_.faults);
      faults_ = faults.get();
      backend_ = std::move(faults);
    }
    backend_name_ = backend_->name();
    return true;
  } catch (const std::exception& e) {
    why_not_ = e.what();
    return false;
  }
}

void Engine::perform() noexcept {
  const std::shared_ptr<Engine> self = std::move(self_);
  const bool works = set_up();
  if (works) {
    {
      std::lock_guard lock(mutex_);
      is_set_up_ = true;
    }
    changed_.notify_all();
    loop();
  }
  std::unique_ptr<Backend> backend;
  {
    std::lock_guard lock(mutex_);
    backend.swap(backend_);
    faults_ = nullptr;
    wants_wake_ = false;
  }
  backend = nullptr;
  {
    std::lock_guard lock(mutex_);
    has_ended_ = true;
  }
  changed_.notify_all();
}

// ---- operations

void Engine::submit(Request&& request) {
  refuse_after_fork();
  auto operation = std::make_unique<Operation>(std::move(request));
  std::unique_lock lock(mutex_);
  if (options_.max_pending != 0) {
    changed_.wait(lock, [this] { return is_closed_ || pending_ < options_.max_pending; });
  }
  if (is_closed_) throw Error(ErrorKind::invalid_state, "the storage engine is closed");
  ++pending_;
  inbox_.push(operation.release());
  if (std::exchange(wants_wake_, false)) backend_->wake();
}

void Engine::loop() noexcept {
  std::vector<Block*> ended;
  ended.reserve(blocks_.size());
  while (true) {
    {
      std::lock_guard lock(mutex_);
      line_.append(inbox_);
    }
    cut_blocks();
    bool may_block;
    {
      std::lock_guard lock(mutex_);
      may_block = inbox_.empty() || free_.empty();
      if (is_closed_ && inbox_.empty() && !has_work()) return;
      wants_wake_ = may_block && !free_.empty();
    }
    backend_->wait(may_block, ended);
    for (Block* const block : ended) take(*block);
    ended.clear();
  }
}

void Engine::cut_blocks() noexcept {
  while (!line_.empty()) {
    Operation* const operation = line_.first();
    if (!operation->begin()) {
      end(line_.pop());
      continue;
    }
    while (operation->has_next() && !free_.empty()) {
      Block& block = *free_.back();
      free_.pop_back();
      operation->next(block);
      add(counters_.blocks);
      if (block.is_staged) add(counters_.staged);
      backend_->put(block);
    }
    if (operation->has_next()) return;
    line_.pop();
    if (operation->is_over()) end(operation);
  }
}

void Engine::take(Block& block) noexcept {
  Operation* const operation = block.operation;
  if (operation->take(block) == Operation::Outcome::again) {
    add(counters_.again);
    backend_->put(block);
    return;
  }
  free_.push_back(&block);
  if (operation->is_over()) end(operation);
}

void Engine::end(Operation* operation) noexcept {
  const bool is_read = operation->direction() == Direction::read;
  add(is_read ? counters_.reads : counters_.writes);
  if (operation->has_succeeded()) add(is_read ? counters_.bytes_read : counters_.bytes_written, operation->size());
  bool tells;
  {
    std::lock_guard lock(mutex_);
    tells = options_.max_pending != 0 && pending_ == options_.max_pending;
    --pending_;
  }
  if (tells) changed_.notify_all();
  operation->finish();
  delete operation;
}

Engine::Statistics Engine::statistics() const noexcept {
  const auto read = [](const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  Statistics s{
      read(counters_.reads),  read(counters_.writes), read(counters_.bytes_read), read(counters_.bytes_written),
      read(counters_.blocks), read(counters_.again),  read(counters_.staged),     0};
  std::lock_guard lock(mutex_);
  s.pending = pending_;
  return s;
}

}  // namespace cudafuture::storage
