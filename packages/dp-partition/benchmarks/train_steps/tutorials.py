"""Steps of torch's tutorials and examples."""

from __future__ import annotations

import random
import time
from collections import namedtuple
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from train_steps.row import ConvNet, Script, TinyGPT, mlp, row


@row("torch tutorial: quickstart")
def quickstart():
    model, loss_fn = mlp(act=nn.ReLU), nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(model, loss_fn, optimizer, X, y):
        model.train()
        pred = model(X)
        loss = loss_fn(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(train, (model, loss_fn, optimizer), lambda d: (d.x(8), d.ints(4)), [model])


@row("torch examples: mnist", independent=False)
def mnist_with_dropout_and_log_lines():
    model = nn.Sequential(ConvNet(1, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 4), nn.LogSoftmax(1))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    args = SimpleNamespace(log_interval=2, dry_run=False)

    def train(args, model, optimizer, data, target, batch_idx):
        model.train()
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train batch {batch_idx}\tLoss: {loss.item():.6f}")

    return Script(train, (args, model, optimizer), lambda d: (d.x(1, 8, 8), d.ints(4), d.call), [model])


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count, self.val = name, 0.0, 0, 0.0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


@row("torch examples: imagenet", independent=False)
def imagenet_with_meters():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6))
    criterion = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    losses, top1, top5, batch_time = (AverageMeter(n) for n in ("Loss", "Acc@1", "Acc@5", "Time"))

    def accuracy(output, target, topk):
        with torch.no_grad():
            _, pred = output.topk(max(topk), 1)
            correct = pred.t().eq(target.view(1, -1))
            return [correct[:k].reshape(-1).float().sum(0, keepdim=True) * (100.0 / target.size(0)) for k in topk]

    def train(model, criterion, optimizer, images, target):
        end = time.time()
        model.train()
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0].item(), images.size(0))
        top5.update(acc5[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        return losses.avg, top1.avg, top5.avg

    return Script(train, (model, criterion, optimizer), lambda d: (d.x(3, 8, 8), d.ints(6)), [model])


class RNNModel(nn.Module):
    def __init__(self, kind="LSTM", vocab=20, width=12):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(vocab, width), getattr(nn, kind)(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, ids, hidden):
        out, hidden = self.rnn(self.encoder(ids), hidden)
        return self.decoder(out), hidden


@row("torch examples: word_language_model")
def word_language_model_with_carried_hidden_state():
    model, criterion = RNNModel(), nn.CrossEntropyLoss()
    state = {"hidden": None, "total": 0.0}

    def repackage(h):
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage(v) for v in h)

    def train(model, data, targets, lr):
        model.train()
        model.zero_grad()
        hidden = repackage(state["hidden"]) if state["hidden"] is not None else None
        output, hidden = model(data, hidden)
        loss = criterion(output.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        state["hidden"] = hidden
        state["total"] += loss.item()

    return Script(
        train, (model,), lambda d: (d.ints(20, 6), d.ints(20, 6), 2.0 if d.call < 4 else 0.5), [model]
    )  # fmt: skip


@row("torch examples: word_language_model")
def transformer_language_model_clipped():
    model = TinyGPT()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)

    def train(model, optimizer, scheduler, data, targets):
        loss = F.cross_entropy(model(data).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return loss

    return Script(train, (model, optimizer, scheduler), lambda d: (d.ints(24, 6), d.ints(24, 6)), [model])


@row("torch examples: vae", independent=False)
def vae_with_summed_loss():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(16, 12), nn.Linear(12, 4), nn.Linear(12, 4)
            self.fc3, self.fc4 = nn.Linear(4, 12), nn.Linear(12, 16)

        def forward(self, x):
            h = F.relu(self.fc1(x))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    model = VAE()
    optimizer = Adam(model.parameters(), lr=1e-3)
    total = [0.0]

    def train(model, optimizer, data):
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        bce = F.binary_cross_entropy(recon, data, reduction="sum")
        loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss.backward()
        total[0] += loss.item()
        optimizer.step()

    return Script(train, (model, optimizer), lambda d: (d.unit(16),), [model, total])


@row("torch examples: super_resolution")
def super_resolution_with_pixel_shuffle():
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, low, high):
        optimizer.zero_grad()
        loss = F.mse_loss(model(low), high)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Script(train, (model, optimizer), lambda d: (d.x(1, 4, 4), d.x(1, 8, 8)), [model])


@row("torch examples: siamese_network")
def siamese_network():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.fc = ConvNet(1, 8), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, a, b):
            return torch.sigmoid(self.fc(torch.cat((self.trunk(a), self.trunk(b)), 1)))

    model, criterion = Siamese(), nn.BCELoss()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def train(model, optimizer, one, two, targets):
        optimizer.zero_grad()
        outputs = model(one, two).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    return Script(
        train, (model, optimizer), lambda d: (d.x(1, 8, 8), d.x(1, 8, 8), d.ints(2).double()), [model]
    )  # fmt: skip


# Alone, a bias before a norm has rounding as its gradient, which Adam scales up: only ranks are compared.
@row("torch examples: fast_neural_style", independent=False)
def neural_style_with_a_frozen_network():
    norm = nn.InstanceNorm2d(8, affine=True)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    vgg = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3)).requires_grad_(False)
    optimizer, style = Adam(net.parameters(), 1e-2), torch.randn(1, 8, 8)

    def gram(y):
        b, c, h, w = y.shape
        flat = y.view(b, c, w * h)
        return flat.bmm(flat.transpose(1, 2)) / (c * h * w)

    def train(net, vgg, optimizer, x):
        optimizer.zero_grad()
        y = net(x)
        features_y, features_x = vgg(y), vgg(x)
        content = 1e5 * F.mse_loss(features_y, features_x)
        styled = 1e3 * F.mse_loss(gram(features_y), style.expand(len(x), -1, -1))
        (content + styled).backward()
        optimizer.step()
        return content, styled

    return Script(train, (net, vgg, optimizer), lambda d: (d.x(3, 8, 8),), [net])


@row("torch examples: time_sequence_prediction")
def sine_waves_with_lbfgs():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

        def forward(self, inputs):
            h = [torch.zeros(len(inputs), 8) for _ in range(4)]
            outputs = []
            for x in inputs.split(1, dim=1):
                h[0], h[1] = self.lstm1(x, (h[0], h[1]))
                h[2], h[3] = self.lstm2(h[0], (h[2], h[3]))
                outputs.append(self.linear(h[2]))
            return torch.cat(outputs, dim=1)

    seq, criterion = Sequence(), nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.5, max_iter=4)

    def train(x, y):
        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return Script(train, (), lambda d: (d.x(5), d.x(5)), [seq])


@row("torch examples: regression")
def polynomial_regression_without_an_optimizer():
    fc = nn.Linear(4, 1)

    def step(x):
        features = torch.cat([x**i for i in range(1, 5)], 1)
        fc.zero_grad()
        output = F.smooth_l1_loss(fc(features), features @ torch.ones(4, 1) + 1)
        loss = output.item()
        output.backward()
        for param in fc.parameters():
            param.data.add_(-0.1 * param.grad)
        return loss < 1e-3

    return Script(step, (), lambda d: (d.x(1),), [fc])


@row("torch tutorial: learning PyTorch with examples")
def plain_tensors_without_a_module():
    a, b = torch.zeros((), requires_grad=True), torch.ones((), requires_grad=True)

    def step(x, y):
        loss = (a + b * x - y).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for w in (a, b):
                w -= 0.1 * w.grad
                w.grad = None
        return loss.item()

    return Script(step, (), lambda d: (d.x(), d.x()), [a, b])


@row("torch tutorial: what is torch.nn really")
def loss_batch_that_trains_or_evaluates():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_batch(model, loss_func, xb, yb, opt=None):
        loss = loss_func(model(xb), yb)
        if opt is not None:
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.item(), len(xb)

    return Script(
        loss_batch, (model, F.cross_entropy), lambda d: (d.x(8), d.ints(4), opt if d.call != 2 else None), [model]
    )  # fmt: skip


@row("torch tutorial: seq2seq translation", independent=False)
def seq2seq_with_two_optimizers_and_teacher_forcing():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gru = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)

        def forward(self, ids):
            return self.gru(self.embedding(ids))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gru, self.out = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 12)

        def forward(self, hidden, targets, forced):
            token, outputs = torch.zeros(len(targets), 1, dtype=torch.long), []
            for i in range(targets.shape[1]):
                out, hidden = self.gru(F.relu(self.embedding(token)), hidden)
                outputs.append(self.out(out))
                token = targets[:, i : i + 1] if forced else outputs[-1].argmax(-1).detach()
            return F.log_softmax(torch.cat(outputs, 1), -1)

    encoder, decoder = Encoder(), Decoder()
    one, two = Adam(encoder.parameters(), lr=1e-2), Adam(decoder.parameters(), lr=1e-2)
    total = [0.0]

    def train(source, target):
        one.zero_grad()
        two.zero_grad()
        _, hidden = encoder(source)
        out = decoder(hidden, target, random.random() < 0.5)
        loss = F.nll_loss(out.flatten(0, 1), target.flatten())
        loss.backward()
        one.step()
        two.step()
        total[0] += loss.item()
        return loss.item()

    return Script(train, (), lambda d: (d.ints(12, 4), d.ints(12, 5)), [encoder, decoder, total])


@row("torch tutorial: transfer learning")
def transfer_learning_with_phases():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    for p in model[0].parameters():
        p.requires_grad = False
    optimizer = SGD(model[3].parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
    running = {"loss": 0.0, "corrects": 0, "best": 0.0}

    def one_batch(phase, inputs, labels):
        model.train() if phase == "train" else model.eval()
        optimizer.zero_grad()
        with torch.set_grad_enabled(phase == "train"):
            outputs = model(inputs)
            _, preds = torch.max(outputs, 1)
            loss = F.cross_entropy(outputs, labels)
            if phase == "train":
                loss.backward()
                optimizer.step()
        running["loss"] += loss.item() * inputs.size(0)
        running["corrects"] += torch.sum(preds == labels.data).item()
        if phase == "train":
            scheduler.step()
        return running["loss"], running["corrects"]

    return Script(
        one_batch, (), lambda d: ("val" if d.call % 3 == 2 else "train", d.x(3, 8, 8), d.ints(3)), [model]
    )  # fmt: skip


@row("torch vision references: detection")
def detection_with_a_dict_of_losses_and_a_finite_check():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.box, self.cls = mlp(8, 16, 8), nn.Linear(8, 4), nn.Linear(8, 3)

        def forward(self, images, targets):
            h = self.backbone(images)
            return {
                "loss_classifier": F.cross_entropy(self.cls(h), targets["labels"]),
                "loss_box_reg": F.smooth_l1_loss(self.box(h), targets["boxes"]),
            }

    model = Detector()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.001, total_iters=4)

    def train(model, optimizer, lr_scheduler, images, targets):
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if loss_value != loss_value or loss_value == float("inf"):
            raise SystemExit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        return {k: v.item() for k, v in loss_dict.items()} | {"lr": optimizer.param_groups[0]["lr"]}

    return Script(
        train, (model, optimizer, warmup), lambda d: (d.x(8), {"labels": d.ints(3), "boxes": d.x(4)}), [model]
    )  # fmt: skip


@row("torch recipe: automatic mixed precision", limit=1e-3, independent=False)
def autocast_and_grad_scaler():
    model = mlp().float()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def train(model, optimizer, scaler, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return Script(train, (model, optimizer, scaler), lambda d: (d.x(8).float(), d.x(4).float()), [model])


@row("torch tutorial: knowledge distillation")
def knowledge_distillation():
    teacher, student = mlp(8, 32, 5), mlp(8, 8, 5)
    optimizer = Adam(student.parameters(), lr=1e-2)

    def train(teacher, student, optimizer, inputs, labels):
        teacher.eval()
        student.train()
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft = F.softmax(teacher_logits / 2, dim=-1)
        log_soft = F.log_softmax(student_logits / 2, dim=-1)
        distill = torch.sum(soft * (soft.log() - log_soft)) / log_soft.size(0) * 4
        loss = 0.25 * distill + 0.75 * F.cross_entropy(student_logits, labels)
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (teacher, student, optimizer), lambda d: (d.x(8), d.ints(5)), [student, teacher])


@row("torch tutorial: parametrizations")
def orthogonal_parametrization():
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.x(2)), [model])


@row("torch tutorial: pruning")
def pruning_every_few_calls():
    import torch.nn.utils.prune as prune

    model = mlp()
    for i in (0, 2):
        prune.l1_unstructured(model[i], "weight", amount=0.1)
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, x, y, call):
        if call == 3:
            for i in (0, 2):
                prune.l1_unstructured(model[i], "weight", amount=0.2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.ints(4), d.call), [model])


@row("torch tutorial: optimizer step in backward")
def optimizer_step_fused_into_backward():
    model = mlp()
    optimizers = {p: Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def train(model, x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()

    return Script(train, (model,), lambda d: (d.x(8), d.ints(4)), [model])


@row("torch tutorial: stochastic weight averaging")
def stochastic_weight_averaging():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    swa_scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)

    def train(x, y, epoch):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if epoch > 3:
            averaged.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()

    return Script(train, (), lambda d: (d.x(8), d.ints(4), d.call), [model, averaged])


@row("torch tutorial: TensorBoard")
def tensorboard_running_loss_and_histograms():
    model = ConvNet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

    class Writer:
        def __init__(self):
            self.scalars, self.histograms = [], {}

        def add_scalar(self, tag, value, step):
            self.scalars.append((tag, float(value), step))

        def add_histogram(self, tag, values, step):
            self.histograms[tag, step] = values.detach().cpu().numpy().std()

    writer, running = Writer(), {"loss": 0.0}

    def train(model, optimizer, inputs, labels, i):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        for name, p in model.named_parameters():
            writer.add_histogram(f"grad/{name}", p.grad, i)
        optimizer.step()
        running["loss"] += loss.item()
        if i % 2 == 1:
            writer.add_scalar("training loss", running["loss"] / 2, i)
            running["loss"] = 0.0
        return [v for _, v, _ in writer.scalars]

    return Script(train, (model, optimizer), lambda d: (d.x(1, 8, 8), d.ints(4), d.call), [model])


@row("torch recipe: profiler")
def profiler_step_and_record_function():
    from torch.profiler import record_function

    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, x, y):
        with record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        with record_function("backward"):
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        return loss.detach()

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.ints(4)), [model])


@row("torch tutorial: adversarial example generation")
def fgsm_training():
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, data, target):
        data.requires_grad = True
        loss = F.cross_entropy(model(data), target)
        model.zero_grad()
        loss.backward()
        perturbed = (data + 0.1 * data.grad.sign()).detach()
        optimizer.zero_grad()
        adversarial = F.cross_entropy(model(perturbed), target)
        adversarial.backward()
        optimizer.step()
        return adversarial.item()

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.ints(4)), [model])


@row("torch tutorial: per-sample gradients (DP-SGD)", independent=False)
def per_sample_gradients_clipped():
    from torch.func import functional_call, grad, vmap

    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, x, y):
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss_of(params, sample, target):
            out = functional_call(model, params, (sample.unsqueeze(0),))
            return F.cross_entropy(out, target.unsqueeze(0))

        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            g = each[name]
            p.grad = (g * factor.view(-1, *[1] * (g.dim() - 1))).mean(0)
        optimizer.step()

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.ints(4)), [model])


@row("torch tutorial: BiLSTM-CRF")
def crf_loss_on_an_lstm():
    class Crf(nn.Module):
        def __init__(self, tags=4):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 4, bidirectional=True, batch_first=True)
            self.hidden2tag, self.transitions = nn.Linear(8, tags), nn.Parameter(torch.randn(tags, tags))

        def neg_log_likelihood(self, sentence, tags):
            feats = self.hidden2tag(self.lstm(self.embed(sentence))[0])
            alpha = feats[:, 0]
            for t in range(1, feats.shape[1]):
                alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transitions + feats[:, t].unsqueeze(1), 1)
            gold = feats.gather(2, tags.unsqueeze(2)).sum((1, 2)) + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
            return (torch.logsumexp(alpha, 1) - gold).mean()

    model = Crf()
    optimizer = SGD(model.parameters(), lr=0.05, weight_decay=1e-4)

    def train(sentence, tags):
        model.zero_grad()
        loss = model.neg_log_likelihood(sentence, tags)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(train, (), lambda d: (d.ints(12, 5), d.ints(4, 5)), [model])


@row("torchaudio tutorial: CTC speech model")
def ctc_loss():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, spectrogram, labels):
        optimizer.zero_grad()
        output = F.log_softmax(model(spectrogram), dim=2).transpose(0, 1)
        lengths = torch.full((len(labels),), output.shape[0], dtype=torch.long)
        targets = torch.full((len(labels),), labels.shape[1], dtype=torch.long)
        loss = F.ctc_loss(output, labels + 1, lengths, targets)
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(9, 6), d.ints(4, 3)), [model])


@row("torch tutorial: text classification", independent=False)
def text_classification_with_an_embedding_bag():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.fc = nn.EmbeddingBag(20, 8, sparse=False), nn.Linear(8, 3)

        def forward(self, text, offsets):
            return self.fc(self.embedding(text, offsets))

    model = Classifier()
    optimizer = SGD(model.parameters(), lr=1.0)
    total = {"acc": 0, "count": 0}

    def train(label, text, offsets):
        optimizer.zero_grad()
        predicted = model(text, offsets)
        loss = F.cross_entropy(predicted, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        total["acc"] += (predicted.argmax(1) == label).sum().item()
        total["count"] += label.size(0)
        return total["acc"] / total["count"]

    def batch(d):
        return d.ints(3), d.ints(20, 4 + d.call).flatten(), torch.arange(4) * (4 + d.call)

    return Script(train, (), batch, [model])


Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


@row("torch tutorial: DQN", independent=False)
def dqn_with_replay_and_soft_target():
    policy, target = mlp(4, 16, 2, nn.ReLU), mlp(4, 16, 2, nn.ReLU)
    target.load_state_dict(policy.state_dict())
    optimizer, memory = AdamW(policy.parameters(), lr=1e-2, amsgrad=True), []

    def optimize_model(transition):
        memory.append(transition)
        if len(memory) < 2:
            return
        batch = Transition(*zip(*random.sample(memory, 2), strict=True))
        state, action, reward = torch.cat(batch.state), torch.cat(batch.action), torch.cat(batch.reward)
        values = policy(state).gather(1, action)
        with torch.no_grad():
            expected = target(torch.cat(batch.next_state)).max(1).values * 0.99 + reward
        loss = F.smooth_l1_loss(values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        one, two = target.state_dict(), policy.state_dict()
        for key in two:
            one[key] = two[key] * 0.05 + one[key] * 0.95
        target.load_state_dict(one)

    return Script(
        optimize_model, (), lambda d: (Transition(d.x(4), d.ints(2, 1), d.x(4), d.x()),), [policy, target]
    )  # fmt: skip


@row("torch examples: reinforcement_learning", independent=False)
def reinforce_with_saved_log_probabilities():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine1, self.affine2 = nn.Linear(4, 16), nn.Linear(16, 2)
            self.saved_log_probs, self.rewards = [], []

        def forward(self, x):
            return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)

    policy = Policy()
    optimizer = Adam(policy.parameters(), lr=1e-2)

    def episode(states):
        for state in states:
            m = torch.distributions.Categorical(policy(state.unsqueeze(0)))
            action = m.sample()
            policy.saved_log_probs.append(m.log_prob(action))
            policy.rewards.append(float(state[action.item()]))
        returns, r_sum = [], 0.0
        for r in policy.rewards[::-1]:
            r_sum = r + 0.9 * r_sum
            returns.insert(0, r_sum)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = [-p * R for p, R in zip(policy.saved_log_probs, returns, strict=True)]
        optimizer.zero_grad()
        loss = torch.cat(loss).sum()
        loss.backward()
        optimizer.step()
        del policy.rewards[:]
        del policy.saved_log_probs[:]
        return loss.item()

    return Script(episode, (), lambda d: (d.x(4),), [policy])


@row("torch examples: gcn", independent=False)
def graph_convolution_with_a_training_mask():
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

        def forward(self, x, adj):
            return F.log_softmax(adj @ self.two(F.relu(adj @ self.one(x))), dim=1)

    model = GCN()
    optimizer = Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def train_iter(model, optimizer, x, adj, target, mask):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss = F.nll_loss(output[mask], target[mask])
        loss.backward()
        optimizer.step()
        return loss

    def batch(d):
        adjacency = torch.eye(4) + (d.x(4) > 0).double()
        return d.x(6), adjacency / adjacency.sum(1, keepdim=True), d.ints(3), torch.tensor([0, 2, 3])

    return Script(train_iter, (model, optimizer), batch, [model])


@row("torch examples: mnist_forward_forward")
def forward_forward_layers_with_their_own_optimizers():
    class Layer(nn.Linear):
        def __init__(self, a, b):
            super().__init__(a, b)
            self.opt = Adam(self.parameters(), lr=1e-2)

        def forward(self, x):
            return F.relu(F.linear(x / (x.norm(2, 1, keepdim=True) + 1e-4), self.weight, self.bias))

        def train_on(self, pos, neg):
            g_pos, g_neg = self(pos).pow(2).mean(1), self(neg).pow(2).mean(1)
            loss = F.softplus(torch.cat([2 - g_pos, g_neg - 2])).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            return self(pos).detach(), self(neg).detach(), loss.item()

    layers = nn.ModuleList([Layer(8, 16), Layer(16, 16)])

    def train(x_pos, x_neg):
        losses = []
        for layer in layers:
            x_pos, x_neg, loss = layer.train_on(x_pos, x_neg)
            losses.append(loss)
        return losses

    return Script(train, (), lambda d: (d.x(8), d.x(8)), [layers])


@row("torch examples: dcgan", independent=False)
def dcgan():
    G = nn.Sequential(nn.ConvTranspose2d(4, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 5), nn.Tanh())
    D = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))
    g_opt, d_opt = Adam(G.parameters(), 2e-3, (0.5, 0.999)), Adam(D.parameters(), 2e-3, (0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    def train(G, D, g_opt, d_opt, real):
        D.zero_grad()
        label = torch.full((len(real), 1), 1.0)
        err_real = criterion(D(real), label)
        err_real.backward()
        fake = G(torch.randn(len(real), 4, 1, 1))
        label.fill_(0.0)
        err_fake = criterion(D(fake.detach()), label)
        err_fake.backward()
        d_opt.step()
        G.zero_grad()
        label.fill_(1.0)
        err_g = criterion(D(fake), label)
        err_g.backward()
        g_opt.step()
        return (err_real + err_fake).item(), err_g.item()

    return Script(train, (G, D, g_opt, d_opt), lambda d: (d.x(1, 8, 8),), [G, D])


@row("torch tutorial: word embeddings", independent=False)
def n_gram_loop_inside_the_step():
    class NGram(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings, self.linear1, self.linear2 = nn.Embedding(12, 6), nn.Linear(12, 16), nn.Linear(16, 12)

        def forward(self, ids):
            return F.log_softmax(self.linear2(F.relu(self.linear1(self.embeddings(ids).view(1, -1)))), dim=1)

    model = NGram()
    optimizer = SGD(model.parameters(), lr=0.1)

    def epoch(contexts, targets):
        total_loss = 0
        for context, target in zip(contexts, targets, strict=True):
            model.zero_grad()
            loss = F.nll_loss(model(context), target.unsqueeze(0))
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
        return total_loss

    return Script(epoch, (), lambda d: (d.ints(12, 2), d.ints(12)), [model])
