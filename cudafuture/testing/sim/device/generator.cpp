#include "sim/device/generator.h"

#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

#include "sim/device/current.h"

namespace sim {
namespace {

// The finalizer of splitmix64 (Steele, Lea, Flood 2014): consecutive counters give unrelated seeds.
std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The state is a seed, and how many seeds have been drawn from it.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  void set_current_seed(std::uint64_t seed) override {
    seed_ = seed;
    drawn_ = 0;
  }
  void set_offset(std::uint64_t offset) override { drawn_ = offset; }
  std::uint64_t get_offset() const override { return drawn_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK_VALUE(state.numel() == sizeof(State), "the state of a simulated generator has ", sizeof(State),
                      " bytes, not ", state.numel());
    State words;
    std::memcpy(&words, state.data_dtype_initialized<std::uint8_t>(), sizeof(words));
    seed_ = words[0];
    drawn_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const State words{seed_, drawn_};
    at::Tensor state =
        at::empty({static_cast<std::int64_t>(sizeof(words))}, at::TensorOptions().dtype(at::kByte).device(c10::kCPU));
    std::memcpy(state.data_ptr(), &words, sizeof(words));
    return state.getIntrusivePtr();
  }

  std::uint64_t draw() { return mix(seed_ + 0x9e3779b97f4a7c15u * ++drawn_); }

 private:
  using State = std::array<std::uint64_t, 2>;

  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->drawn_ = drawn_;
    return copy;
  }

  std::uint64_t seed_ = c10::default_rng_seed_val;
  std::uint64_t drawn_ = 0;
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kMaxDevices>;
    for (int i = 0; i < kMaxDevices; ++i) (*made)[static_cast<std::size_t>(i)] = new_generator(i);
    return made;
  }();
  return generators->at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(device < 0 ? current_device() : device));
}

std::uint64_t draw_seed(const at::Generator& generator) {
  auto* ours = at::check_generator<Generator>(generator);
  const std::lock_guard lock(ours->mutex_);
  return ours->draw();
}

}  // namespace sim
