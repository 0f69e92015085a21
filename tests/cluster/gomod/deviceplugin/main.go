// Command deviceplugin offers the kubelet devices that a file describes, over the device plugin API v1beta1.
//
//	deviceplugin -config FILE -allocations FILE [-directory DIR]
//
// It knows nothing of GPUs: what a container gets is in the file (see config), which is read again whenever it is replaced, so
// a device falls ill by a rename. Every answer to Allocate adds a line to the other file: the IDs, separated by blanks.
//
// A kubelet that starts removes all sockets beside its own. A new one of its own therefore means: listen and register again.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	socketName = "deviceplugin.sock"
	// The kubelet's socket is there a moment before somebody answers.
	registerTimeout = 30 * time.Second
	registerPause   = 50 * time.Millisecond
)

type mount struct {
	Host      string `json:"host"`
	Container string `json:"container"`
	ReadOnly  bool   `json:"readOnly"`
}

type device struct {
	ID      string  `json:"id"`
	Healthy bool    `json:"healthy"`
	Mounts  []mount `json:"mounts"`
}

type config struct {
	// Resource is the name that pods ask for.
	Resource string `json:"resource"`
	// Variable gets the IDs of the container's devices, separated by commas.
	Variable string `json:"variable"`
	// Env and Mounts are what a container gets with any device.
	Env     map[string]string `json:"env"`
	Mounts  []mount           `json:"mounts"`
	Devices []device          `json:"devices"`
}

func load(path string) (config, error) {
	var c config
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	return c, err
}

type plugin struct {
	api.UnimplementedDevicePluginServer
	allocations string

	mutex  sync.Mutex
	config config
	// changed is closed, and replaced, with every new config.
	changed chan struct{}
}

func (p *plugin) set(c config) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.config = c
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *plugin) get() (config, <-chan struct{}) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.config, p.changed
}

func (p *plugin) options() *api.DevicePluginOptions {
	return &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return p.options(), nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		c, changed := p.get()
		list := &api.ListAndWatchResponse{}
		for _, d := range c.Devices {
			health := api.Unhealthy
			if d.Healthy {
				health = api.Healthy
			}
			list.Devices = append(list.Devices, &api.Device{ID: d.ID, Health: health})
		}
		if err := stream.Send(list); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

// GetPreferredAllocation takes the devices in the order of the file.
func (p *plugin) GetPreferredAllocation(_ context.Context, r *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	c, _ := p.get()
	answer := &api.PreferredAllocationResponse{}
	for _, request := range r.ContainerRequests {
		ids := slices.Clone(request.MustIncludeDeviceIDs)
		for _, d := range c.Devices {
			if len(ids) < int(request.AllocationSize) && slices.Contains(request.AvailableDeviceIDs, d.ID) && !slices.Contains(ids, d.ID) {
				ids = append(ids, d.ID)
			}
		}
		answer.ContainerResponses = append(answer.ContainerResponses, &api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return answer, nil
}

func (p *plugin) Allocate(_ context.Context, r *api.AllocateRequest) (*api.AllocateResponse, error) {
	c, _ := p.get()
	answer := &api.AllocateResponse{}
	for _, request := range r.ContainerRequests {
		container := &api.ContainerAllocateResponse{
			Envs:   map[string]string{c.Variable: strings.Join(request.DevicesIds, ",")},
			Mounts: mounts(c.Mounts),
		}
		for name, value := range c.Env {
			container.Envs[name] = value
		}
		for _, id := range request.DevicesIds {
			i := slices.IndexFunc(c.Devices, func(d device) bool { return d.ID == id })
			if i < 0 {
				return nil, status.Errorf(codes.NotFound, "unknown device %s", id)
			}
			container.Mounts = append(container.Mounts, mounts(c.Devices[i].Mounts)...)
		}
		if err := p.record(request.DevicesIds); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		answer.ContainerResponses = append(answer.ContainerResponses, container)
	}
	return answer, nil
}

func mounts(list []mount) []*api.Mount {
	var answer []*api.Mount
	for _, m := range list {
		answer = append(answer, &api.Mount{HostPath: m.Host, ContainerPath: m.Container, ReadOnly: m.ReadOnly})
	}
	return answer
}

func (p *plugin) record(ids []string) error {
	file, err := os.OpenFile(p.allocations, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = fmt.Fprintln(file, strings.Join(ids, " "))
	return err
}

// serve listens beside the kubelet's socket and registers there; the server is stopped by the caller.
func (p *plugin) serve(directory string) (*grpc.Server, error) {
	socket := filepath.Join(directory, socketName)
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go func() {
		if err := server.Serve(listener); err != nil {
			log.Fatalf("serve: %v", err)
		}
	}()
	return server, p.register(filepath.Join(directory, filepath.Base(api.KubeletSocket)))
}

func (p *plugin) register(kubelet string) error {
	connection, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	c, _ := p.get()
	request := &api.RegisterRequest{Version: api.Version, Endpoint: socketName, ResourceName: c.Resource, Options: p.options()}
	client := api.NewRegistrationClient(connection)
	for end := time.Now().Add(registerTimeout); ; time.Sleep(registerPause) {
		connection.ResetConnectBackoff()
		if _, err = client.Register(context.Background(), request); err == nil {
			log.Printf("%s: registered with the kubelet", c.Resource)
			return nil
		}
		if time.Now().After(end) {
			return err
		}
	}
}

func run(file, allocations, directory string) error {
	first, err := load(file)
	if err != nil {
		return err
	}
	p := &plugin{allocations: allocations, config: first, changed: make(chan struct{})}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()
	for _, name := range []string{filepath.Dir(file), directory} {
		if err := watcher.Add(name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	server, err := p.serve(directory)
	if err != nil {
		return err
	}
	for {
		select {
		case event := <-watcher.Events:
			switch {
			case event.Name == file && event.Has(fsnotify.Create):
				c, err := load(file)
				if err != nil {
					log.Printf("%s: %v", file, err)
					continue
				}
				p.set(c)
			case event.Name == filepath.Join(directory, filepath.Base(api.KubeletSocket)) && event.Has(fsnotify.Create):
				server.Stop()
				if server, err = p.serve(directory); err != nil {
					return err
				}
			}
		case err := <-watcher.Errors:
			return err
		}
	}
}

func main() {
	log.SetFlags(log.Ltime)
	file := flag.String("config", "", "what is offered (replace it, do not write into it)")
	allocations := flag.String("allocations", "", "gets a line of IDs for every allocation")
	directory := flag.String("directory", filepath.Clean(api.DevicePluginPath), "of the kubelet's socket")
	flag.Parse()
	log.Fatal(run(filepath.Clean(*file), *allocations, *directory))
}
