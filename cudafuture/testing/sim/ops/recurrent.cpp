// The cells of LSTM and GRU: torch takes it for granted that a device like ours has them in one kernel, as CUDA has,
// and the host has not. The gates of a cell are side by side in the second dimension.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace sim {
namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const Optional& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

at::Tensor or_zeros(const Optional& grad, const at::Tensor& like) {
  return grad.has_value() && grad->defined() ? *grad : at::zeros_like(like);
}

// The workspace holds the activated gates: input, forget, cell, output.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cx, const Optional& input_bias,
                                                         const Optional& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid();
  const at::Tensor forget = gates[1].sigmoid();
  const at::Tensor cell = gates[2].tanh();
  const at::Tensor out = gates[3].sigmoid();
  const at::Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const Optional& grad_hy, const Optional& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const at::Tensor& in = gates[0];
  const at::Tensor& forget = gates[1];
  const at::Tensor& cell = gates[2];
  const at::Tensor& out = gates[3];
  const at::Tensor hy_grad = or_zeros(grad_hy, cx);
  const at::Tensor shown = cy.tanh();
  const at::Tensor cell_grad = or_zeros(grad_cy, cx) + tanh_backward(hy_grad * out, shown);
  const at::Tensor gates_grad =
      at::cat({sigmoid_backward(cell_grad * cell, in), sigmoid_backward(cell_grad * cx, forget),
               tanh_backward(cell_grad * in, cell), sigmoid_backward(hy_grad * shown, out)},
              1);
  return {gates_grad, cell_grad * forget, has_bias ? gates_grad.sum(0) : at::Tensor()};
}

// The workspace holds reset, update, new, the old state, and the hidden part of the new gate.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const Optional& input_bias,
                                            const Optional& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const at::Tensor reset = (input[0] + hidden[0]).sigmoid();
  const at::Tensor update = (input[1] + hidden[1]).sigmoid();
  const at::Tensor fresh = (input[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hy,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const at::Tensor& reset = parts[0];
  const at::Tensor& update = parts[1];
  const at::Tensor& fresh = parts[2];
  const at::Tensor& hx = parts[3];
  const at::Tensor& hidden = parts[4];
  const at::Tensor fresh_grad = tanh_backward(grad_hy * (1 - update), fresh);
  const at::Tensor update_grad = sigmoid_backward(grad_hy * (hx - fresh), update);
  const at::Tensor reset_grad = sigmoid_backward(fresh_grad * hidden, reset);
  const at::Tensor input_grad = at::cat({reset_grad, update_grad, fresh_grad}, 1);
  const at::Tensor hidden_grad = at::cat({reset_grad, update_grad, fresh_grad * reset}, 1);
  if (!has_bias) return {input_grad, hidden_grad, grad_hy * update, at::Tensor(), at::Tensor()};
  return {input_grad, hidden_grad, grad_hy * update, input_grad.sum(0), hidden_grad.sum(0)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace sim
