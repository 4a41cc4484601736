// Convolutions: torch asks a device like ours for kernels of its own under other names.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <utility>

#include "sim/ops/fallback.h"

namespace sim {
namespace {

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, std::int64_t groups) {
  static const Facts& op = facts_of("aten::convolution");
  Values stack{input, weight, bias, stride, padding, dilation, transposed, output_padding, groups};
  run_on_device(op, &stack);
  return std::move(stack.front()).toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input,
                                                                    const at::Tensor& weight, c10::IntArrayRef stride,
                                                                    c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                                    bool transposed, c10::IntArrayRef output_padding,
                                                                    std::int64_t groups,
                                                                    std::array<bool, 3> output_mask) {
  static const Facts& op = facts_of("aten::convolution_backward");
  const c10::List<std::int64_t> bias_sizes({transposed ? weight.size(1) * groups : weight.size(0)});
  const c10::List<bool> mask({output_mask[0], output_mask[1], output_mask[2]});
  Values stack{grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask};
  run_on_device(op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

}  // namespace sim
