// Right values on the hollow card.
//
// PyTorch's host code of an op runs whole, with all that it allocates; its launches do nothing. After it, the CPU
// kernel of the same op runs on CPU tensors in the same memory, and writes what the launches would have written.
// The generator of the card moves on as it would; a CPU kernel draws from a generator seeded by its (seed, offset).
//
// So values are the CPU's: they show what PyTorch and stowplan do with them, and no rounding of a GPU. With
// HOLLOW_UNTOUCHED, only ops whose tensors are all smaller have values: those that a script's branches depend on.

#include <functional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "card.h"

using at::Tensor;
using c10::Dispatcher;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

extern "C" int hollow_leave_copies_out(int);

namespace {

// ---- Tensors of the card as tensors of the CPU, in the same memory

IValue on_cpu(const IValue &);

Tensor on_cpu(const Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    void *data = const_cast<void *>(tensor.const_data_ptr());
    return at::from_blob(data, tensor.sizes(), tensor.strides(), [](void *) {}, options);
}

c10::List<Tensor> on_cpu(const std::vector<Tensor> &tensors) {
    c10::List<Tensor> found;
    for (const Tensor &tensor : tensors) found.push_back(on_cpu(tensor));
    return found;
}

c10::List<std::optional<Tensor>> optional_on_cpu(c10::ArrayRef<IValue> values) {
    c10::List<std::optional<Tensor>> found;
    for (const IValue &value : values) {
        found.push_back(value.isNone() ? std::nullopt : std::make_optional(on_cpu(value.toTensor())));
    }
    return found;
}

IValue on_cpu(const IValue &value) {
    if (value.isTensor()) return on_cpu(value.toTensor());
    if (value.isTensorList()) return on_cpu(value.toTensorVector());
    if (value.isOptionalTensorList()) return optional_on_cpu(value.toListRef());
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kCPU);
    return value;
}

// A tensor among the arguments or results, undefined where there is none.
Tensor tensor_in(const IValue &value) { return value.isTensor() ? on_cpu(value.toTensor()) : Tensor(); }

std::optional<Tensor> optional_in(const IValue &value) {
    Tensor found = tensor_in(value);
    return found.defined() ? std::make_optional(found) : std::nullopt;
}

bool is_untouched(const Tensor &tensor) {
    static const size_t least = size_t(setting("HOLLOW_UNTOUCHED", 0));
    return least && tensor.defined() && tensor.is_cuda() && tensor.nbytes() >= least;
}

// Whether one of these tensors is too large to be computed.
bool is_untouched(const IValue *begin, const IValue *end) {
    for (const IValue *value = begin; value != end; value++) {
        if (value->isTensor() && is_untouched(value->toTensor())) return true;
        if (value->isTensorList()) {
            for (const Tensor &tensor : value->toTensorVector()) {
                if (is_untouched(tensor)) return true;
            }
        }
    }
    return false;
}

void write(const IValue &result, const Tensor &value) {
    Tensor target = tensor_in(result);
    if (!target.defined() || !value.defined() || !target.numel() || !value.numel()) return;
    if (target.sizes() == value.sizes()) {
        target.copy_(value);
    } else if (target.numel() == value.numel()) {
        target.copy_(value.reshape(target.sizes()));
    } else {
        TORCH_WARN_ONCE("hollow card: a result has sizes ", target.sizes(), ", and its value ", value.sizes());
    }
}

// ---- Random numbers

struct Draw {
    uint64_t seed = 0, offset = 0;

    uint64_t mixed() const {  // two numbers into one that looks random, as in SplitMix64
        uint64_t z = seed * 0x9E3779B97F4A7C15 + offset + 1;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }
    at::Generator generator() const { return at::detail::createCPUGenerator(mixed()); }
};

Draw draw_of(const at::Generator &generator) {
    Tensor state = generator.get_state();
    Draw found;
    std::memcpy(&found.seed, state.const_data_ptr(), sizeof found.seed);
    std::memcpy(&found.offset, static_cast<const char *>(state.const_data_ptr()) + sizeof found.seed, sizeof found.offset);
    return found;
}

uint64_t number_in(const IValue &value) {
    Tensor found = tensor_in(value);
    return found.defined() && found.numel() ? uint64_t(found.reshape(-1)[0].to(at::kLong).item<int64_t>()) : 0;
}

// ---- Ops that have no kernel on a CPU: fused attention, cuDNN

using Values = std::vector<IValue>;
using Rule = std::function<void(const Values &arguments, const Values &results, const Draw &)>;

at::ScalarType wide(const Tensor &tensor) { return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

struct Attention {
    Tensor query, key, value, scores, kept, log_sums;
    double scale;
    int64_t heads_of_key;

    Attention(Tensor q, Tensor k, Tensor v, const Tensor &bias, double p, bool is_causal, const IValue &scaled, const Draw &draw) {
        auto dtype = wide(q);
        query = q.to(dtype);
        heads_of_key = q.size(1) / k.size(1);
        key = k.to(dtype).repeat_interleave(heads_of_key, 1);
        value = v.to(dtype).repeat_interleave(heads_of_key, 1);
        scale = scaled.isNone() ? 1 / std::sqrt(double(q.size(-1))) : scaled.toDouble();
        Tensor products = at::matmul(query, key.transpose(-2, -1)) * scale;
        if (bias.defined() && bias.numel()) products = products + bias.to(dtype);
        if (is_causal) {
            Tensor seen = at::ones({products.size(-2), products.size(-1)}, at::kBool).tril();
            products = products.masked_fill(seen.logical_not(), -INFINITY);
        }
        log_sums = at::logsumexp(products, {-1});
        scores = at::softmax(products, -1);
        if (p > 0) kept = (at::rand(products.sizes(), draw.generator(), products.options()) >= p).to(dtype) / (1 - p);
    }

    Tensor dropped(const Tensor &numbers) const { return kept.defined() ? numbers * kept : numbers; }
    Tensor result() const { return at::matmul(dropped(scores), value); }

    Tensor summed_over_heads(const Tensor &gradient) const {
        if (heads_of_key == 1) return gradient;
        auto sizes = gradient.sizes();
        return gradient.reshape({sizes[0], sizes[1] / heads_of_key, heads_of_key, sizes[2], sizes[3]}).sum(2);
    }

    // Of query, key, value and bias.
    std::vector<Tensor> gradients(const Tensor &of_result) const {
        Tensor given = of_result.to(query.scalar_type());
        Tensor of_value = at::matmul(dropped(scores).transpose(-2, -1), given);
        Tensor of_scores = dropped(at::matmul(given, value.transpose(-2, -1)));
        Tensor of_products = scores * (of_scores - (of_scores * scores).sum(-1, true));
        Tensor of_query = at::matmul(of_products, key) * scale;
        Tensor of_key = at::matmul(of_products.transpose(-2, -1), query) * scale;
        return {of_query, summed_over_heads(of_key), summed_over_heads(of_value), of_products};
    }
};

void write_log_sums(const IValue &result, const Tensor &log_sums) {  // their rows are padded
    Tensor target = tensor_in(result);
    if (target.defined() && target.dim() == 3) target.narrow(2, 0, log_sums.size(2)).copy_(log_sums);
}

void write_gradients(const Values &results, const std::vector<Tensor> &gradients) {
    for (size_t number = 0; number < 3; number++) write(results[number], gradients[number]);
}

void efficient_attention(const Values &in, const Values &out, const Draw &) {
    Draw draw{number_in(out[2]), number_in(out[3])};
    Attention found(tensor_in(in[0]), tensor_in(in[1]), tensor_in(in[2]), tensor_in(in[3]), in[5].toDouble(),
                    in[6].toBool(), in[7], draw);
    write(out[0], found.result());
    write_log_sums(out[1], found.log_sums);
}

void efficient_attention_backward(const Values &in, const Values &out, const Draw &) {
    Draw draw{number_in(in[7]), number_in(in[8])};
    Attention found(tensor_in(in[1]), tensor_in(in[2]), tensor_in(in[3]), tensor_in(in[4]), in[9].toDouble(),
                    in[11].toBool(), in[12], draw);
    auto gradients = found.gradients(tensor_in(in[0]));
    write_gradients(out, gradients);
    Tensor bias = tensor_in(out[3]);
    if (bias.defined()) write(out[3], at::sum_to(gradients[3], bias.sizes()));
}

void flash_attention(const Values &in, const Values &out, const Draw &draw) {
    Tensor state = tensor_in(out[6]);
    if (state.defined() && state.numel() >= 2) std::memcpy(state.data_ptr(), &draw, sizeof draw);
    Attention found(tensor_in(in[0]), tensor_in(in[1]), tensor_in(in[2]), Tensor(), in[3].toDouble(), in[4].toBool(),
                    in[6], draw);
    write(out[0], found.result());
    write_log_sums(out[1], found.log_sums);
}

void flash_attention_backward(const Values &in, const Values &out, const Draw &) {
    Draw draw;
    Tensor state = tensor_in(in[12]);
    if (state.defined() && state.numel() >= 2) std::memcpy(&draw, state.data_ptr(), sizeof draw);
    Attention found(tensor_in(in[1]), tensor_in(in[2]), tensor_in(in[3]), Tensor(), in[10].toDouble(), in[11].toBool(),
                    in[14], draw);
    write_gradients(out, found.gradients(tensor_in(in[0])));
}

void convolution(const Values &in, const Values &out, const Draw &) {
    auto padding = in[2].toIntVector(), stride = in[3].toIntVector(), dilation = in[4].toIntVector();
    std::vector<int64_t> none(padding.size(), 0);
    write(out[0], at::convolution(tensor_in(in[0]), tensor_in(in[1]), {}, stride, padding, dilation, false, none, in[5].toInt()));
}

void transposed_convolution(const Values &in, const Values &out, const Draw &) {
    auto padding = in[2].toIntVector(), more = in[3].toIntVector(), stride = in[4].toIntVector(), dilation = in[5].toIntVector();
    write(out[0], at::convolution(tensor_in(in[0]), tensor_in(in[1]), {}, stride, padding, dilation, true, more, in[6].toInt()));
}

void depthwise_convolution(const Values &in, const Values &out, const Draw &) {
    auto stride = in[4].toIntVector(), padding = in[5].toIntVector(), dilation = in[6].toIntVector();
    std::vector<int64_t> none(padding.size(), 0);
    Tensor image = tensor_in(in[0]);
    write(out[0], at::convolution(image, tensor_in(in[1]), optional_in(in[3]), stride, padding, dilation, false, none, image.size(1)));
}

void batch_norm(const Values &in, const Values &out, const Draw &) {
    auto [made, mean, scale] = at::native_batch_norm(
        tensor_in(in[0]), optional_in(in[1]), optional_in(in[2]), optional_in(in[3]), optional_in(in[4]), in[5].toBool(),
        in[6].toDouble(), in[7].toDouble());
    write(out[0], made);
    if (mean.numel() == tensor_in(out[1]).numel()) write(out[1], mean);
    if (scale.numel() == tensor_in(out[2]).numel()) write(out[2], scale);
}

void batch_norm_backward(const Values &in, const Values &out, const Draw &) {
    auto [of_image, of_weight, of_bias] = at::native_batch_norm_backward(
        tensor_in(in[1]), tensor_in(in[0]), optional_in(in[2]), optional_in(in[3]), optional_in(in[4]), optional_in(in[5]),
        optional_in(in[6]), true, in[7].toDouble(), {true, true, true});
    write_gradients(out, {of_image, of_weight, of_bias});
}

void rms_norm_backward(const Values &in, const Values &out, const Draw &) {
    Tensor gradient = tensor_in(in[0]), image = tensor_in(in[1]), factors = tensor_in(in[3]), weight = tensor_in(in[4]);
    auto dtype = wide(image);
    std::vector<int64_t> rows, columns;
    int64_t normalized = int64_t(in[2].toIntVector().size());
    for (int64_t dim = 0; dim < image.dim(); dim++) (dim < image.dim() - normalized ? rows : columns).push_back(dim);
    Tensor scaled = image.to(dtype) * factors.to(dtype), given = gradient.to(dtype);
    Tensor weighted = weight.defined() ? given * weight.to(dtype) : given;
    write(out[0], factors.to(dtype) * (weighted - scaled * (weighted * scaled).mean(columns, true)));
    write(out[1], rows.empty() ? given * scaled : (given * scaled).sum(rows));
}

void fused_dropout(const Values &in, const Values &out, const Draw &draw) {
    Tensor image = tensor_in(in[0]);
    double kept = in[1].toDouble();
    Tensor mask = at::rand(image.sizes(), draw.generator(), at::TensorOptions().dtype(at::kFloat)) < kept;
    write(out[0], image * mask / kept);
    write(out[1], mask);
}

const std::unordered_map<std::string, Rule> RULES = {
    {"aten::_scaled_dot_product_efficient_attention", efficient_attention},
    {"aten::_scaled_dot_product_efficient_attention_backward", efficient_attention_backward},
    {"aten::_scaled_dot_product_flash_attention", flash_attention},
    {"aten::_scaled_dot_product_flash_attention_backward", flash_attention_backward},
    {"aten::cudnn_convolution", convolution},
    {"aten::cudnn_convolution_transpose", transposed_convolution},
    {"aten::_conv_depthwise2d", depthwise_convolution},
    {"aten::_conv_depthwise2d.out", depthwise_convolution},
    {"aten::conv_depthwise3d", depthwise_convolution},
    {"aten::cudnn_batch_norm", batch_norm},
    {"aten::cudnn_batch_norm_backward", batch_norm_backward},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
    {"aten::_fused_dropout", fused_dropout},
};

// Their results have as many elements as the values say: computed on the CPU, and copied.
const std::set<std::string> SIZED_BY_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
};

// On CUDA their statistics are float32, whatever the image is.
const std::set<std::string> WIDE_STATISTICS = {
    "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_group_norm",
    "aten::native_group_norm_backward",
};

// They make no values, or hand a value to the host.
const std::set<std::string> LEFT_ALONE = {
    "aten::as_strided", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor", "aten::_local_scalar_dense", "aten::resize_", "aten::record_stream", "aten::_pin_memory",
    "aten::is_pinned", "aten::_copy_from_and_resize", "aten::unfold", "aten::view", "aten::_reshape_alias",
    "aten::is_set_to", "aten::_cudnn_rnn_flatten_weight",
};

// ---- An op with right values

thread_local int depth = 0;  // of ops inside ops: only the outermost computes values

struct Within {
    Within() : copies(hollow_leave_copies_out(1)) { depth++; }
    ~Within() {
        depth--;
        hollow_leave_copies_out(copies);
    }
    int copies;
};

struct Valued : c10::OperatorKernel {
    Valued(c10::OperatorHandle op, bool has_cpu_kernel)
        : op(op),
          own(op.getComputedKernelForDispatchKey(DispatchKey::CUDA)),
          name(toString(op.operator_name())),
          has_cpu_kernel(has_cpu_kernel),
          is_sized_by_values(SIZED_BY_VALUES.count(name)) {
        auto found = RULES.find(name);
        if (found != RULES.end()) rule = found->second;
        const auto &arguments = op.schema().arguments();
        for (size_t number = 0; number < arguments.size(); number++) {
            if (arguments[number].type()->str().find("Generator") != std::string::npos) generators.push_back(number);
        }
        is_random = op.hasTag(at::Tag::nondeterministic_seeded) || rule || !generators.empty();
    }

    void operator()(const c10::OperatorHandle &, DispatchKeySet keys, Stack *stack) {
        if (depth && !is_sized_by_values) return own.callBoxed(op, keys, stack);
        Values arguments(stack->end() - op.schema().arguments().size(), stack->end());
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        at::Generator given;
        int card = card_of(arguments, given);
        bool is_too_large = !is_sized_by_values && is_untouched(arguments.data(), arguments.data() + arguments.size());
        if (card < 0 || is_too_large) return own.callBoxed(op, keys, stack);
        Draw draw;
        if (is_random) draw = draw_of(given.defined() && given.device().is_cuda() ? given : of_card(card));
        if (is_sized_by_values) {
            stack->resize(stack->size() - arguments.size());
            for (const IValue &result : computed(arguments, draw)) {
                Within within;
                stack->push_back(result.isTensor() ? result.toTensor().to(c10::Device(at::kCUDA, card)) : result);
            }
            return;
        }
        {
            Within within;
            own.callBoxed(op, keys, stack);
        }
        size_t first = stack->size() - op.schema().returns().size();
        Values results(stack->begin() + first, stack->end());
        if (is_untouched(results.data(), results.data() + results.size())) return;
        if (rule) {
            Within within;
            rule(arguments, results, draw);
        } else if (has_cpu_kernel) {
            Stack values = computed(arguments, draw);
            for (size_t number = 0; number < results.size(); number++) {
                if (results[number].isTensor() || results[number].isTensorList()) {
                    write_if_elsewhere(results[number], values[number]);
                } else {
                    (*stack)[first + number] = values[number];
                }
            }
        } else {
            TORCH_WARN_ONCE("hollow card: ", name, " has no kernel on a CPU, and its results are not computed");
        }
    }

private:
    c10::OperatorHandle op;
    c10::SafeKernelFunction own;
    std::string name;
    bool has_cpu_kernel, is_sized_by_values, is_random;
    Rule rule;
    std::vector<size_t> generators;

    // The card that the arguments are on, or -1: what is not strided is left alone.
    static int card_of(const Values &arguments, at::Generator &given) {
        int card = -1;
        bool is_strided = true;
        auto look_at = [&](const Tensor &tensor) {
            if (!tensor.defined()) return;
            if (tensor.is_cuda()) card = tensor.device().index();
            is_strided &= tensor.layout() == at::kStrided && tensor.unsafeGetTensorImpl()->has_storage();
        };
        for (const IValue &argument : arguments) {
            if (argument.isTensor()) look_at(argument.toTensor());
            if (argument.isTensorList()) {
                for (const Tensor &tensor : argument.toTensorVector()) look_at(tensor);
            }
            if (argument.isGenerator()) given = argument.toGenerator();
            if (argument.isDevice() && card < 0 && argument.toDevice().is_cuda()) card = std::max<int>(argument.toDevice().index(), 0);
        }
        return is_strided ? card : -1;
    }

    static const at::Generator &of_card(int card) {
        return at::globalContext().defaultGenerator(c10::Device(at::kCUDA, c10::DeviceIndex(card)));
    }

    // The results of the CPU kernel.
    Stack computed(const Values &arguments, const Draw &draw) const {
        Stack values;
        for (const IValue &argument : arguments) values.push_back(argument.isGenerator() ? IValue() : on_cpu(argument));
        if (WIDE_STATISTICS.count(name)) {
            for (IValue &value : values) {
                if (value.isTensor() && value.toTensor().defined() && at::isReducedFloatingType(value.toTensor().scalar_type())) {
                    value = value.toTensor().to(at::kFloat);
                }
            }
        }
        Within within;
        for (size_t number : generators) values[number] = draw.generator();
        if (is_random && generators.empty()) {  // the kernel asks for the CPU's own generator
            at::Generator own_generator = at::detail::getDefaultCPUGenerator();
            Tensor before = own_generator.get_state();
            own_generator.set_current_seed(draw.mixed());
            op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &values);
            own_generator.set_state(before);
        } else {
            op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &values);
        }
        return values;
    }

    // What the CPU kernel wrote in place is there already.
    static void write_if_elsewhere(const IValue &result, const IValue &value) {
        if (result.isTensorList()) {
            auto targets = result.toTensorVector(), values = value.toTensorVector();
            for (size_t number = 0; number < targets.size(); number++) write_if_elsewhere(targets[number], values[number]);
            return;
        }
        Tensor target = result.toTensor(), found = value.toTensor();
        if (target.defined() && found.defined() && target.const_data_ptr() != found.const_data_ptr()) write(result, found);
    }
};

bool returns_view(const c10::FunctionSchema &schema) {
    for (const auto &result : schema.returns()) {
        if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    }
    return false;
}

bool runs_on_cpu(const c10::OperatorHandle &op) {
    for (DispatchKey key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd,
                            DispatchKey::CompositeExplicitAutogradNonFunctional}) {
        if (op.hasKernelForDispatchKey(key)) return true;
    }
    return false;
}

// Put right values behind every op of aten that has a kernel for CUDA, for good; returns how many there are.
int64_t give_values() {
    static auto *kept = new std::vector<c10::RegistrationHandleRAII>;
    auto &dispatcher = Dispatcher::singleton();
    for (const auto &name : dispatcher.getAllOpNames()) {
        std::string text = toString(name);
        bool is_ours = text.rfind("aten::", 0) == 0 && text.rfind("aten::empty", 0) != 0 && !LEFT_ALONE.count(text);
        auto op = dispatcher.findOp(name);
        if (!is_ours || !op || !op->hasSchema()) continue;
        if (text != "aten::copy_" && !op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
        if (returns_view(op->schema())) continue;
        auto valued = std::make_unique<Valued>(*op, runs_on_cpu(*op) || text == "aten::convolution_backward");
        auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::move(valued));
        kept->push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "hollow card"));
    }
    return int64_t(kept->size());
}

}  // namespace

TORCH_LIBRARY(hollow_card, library) { library.def("give_values() -> int", &give_values); }
